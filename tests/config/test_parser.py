"""A command line, a YAML file and the environment become one frozen config."""

from dataclasses import FrozenInstanceError

import pytest

from openrlhf.config.commands import COMMANDS, PRMConfig, RLConfig, RMConfig, SFTConfig
from openrlhf.config.flags import flag_values, flags_of, replace_flags
from openrlhf.config.help import help_text
from openrlhf.config.parser import build_parser, parse
from openrlhf.errors import ConfigError


def sft(*argv):
    return parse(SFTConfig, argv, environ={})


def rl(*argv, environ=None):
    return parse(RLConfig, argv, environ=environ or {})


def refusal(command, *argv):
    with pytest.raises(ConfigError) as caught:
        parse(command, argv, environ={})
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_no_arguments_give_the_defaults():
    assert sft() == SFTConfig()


# argparse's habits


def test_a_value_follows_its_flag_or_an_equals_sign():
    assert sft("--zero_stage", "3") == sft("--zero_stage=3") == replace_flags(SFTConfig(), zero_stage=3)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("--learning_rat=1e-3", "--learning_rate"),
        ("--zero", "--zero_stage"),
        ("--conf", "--config"),
        ("--wandb_", "--wandb_org or --wandb_group or --wandb_project"),
    ],
)
def test_an_abbreviated_flag_is_rejected_with_its_full_name(given, hint):
    name = given.partition("=")[0]
    assert refusal(SFTConfig, given, "3") == f"{name} is not a flag of this command. Try: {hint}"


def test_the_last_of_two_values_wins():
    assert sft("--zero_stage", "3", "--zero_stage", "1").sharding.zero_stage == 1


@pytest.mark.parametrize("words", [["--ipo"], ["--ipo", "true"], ["--ipo=True"], ["--ipo", "1"], ["--ipo=yes"]])
def test_a_switch_is_on(words):
    assert parse(COMMANDS["train_dpo"], words, environ={}).objective.ipo is True


@pytest.mark.parametrize("words", [[], ["--ipo", "false"], ["--ipo=False"], ["--ipo", "0"], ["--ipo", "--ipo=no"]])
def test_a_switch_is_off(words):
    assert parse(COMMANDS["train_dpo"], words, environ={}).objective.ipo is False


def test_a_switch_that_is_on_by_default_can_be_turned_off():
    assert sft("--muon_nesterov", "false").optimizer.muon_nesterov is False


def test_a_switch_takes_no_other_value():
    message = refusal(SFTConfig, "--packing_samples", "maybe")
    assert "--packing_samples" in message
    assert "'maybe'" in message


def test_lists_become_tuples():
    assert sft("--target_modules", "q_proj", "v_proj").lora.target_modules == ("q_proj", "v_proj")
    assert sft("--adam_betas", "0.8", "0.9").optimizer.adam_betas == (0.8, 0.9)
    assert parse(PRMConfig, ["--reward_tokens", "+", "-"], environ={}).fields.reward_tokens == ("+", "-")


def test_a_list_of_fixed_length_rejects_other_lengths():
    assert "--adam_betas" in refusal(SFTConfig, "--adam_betas", "0.9")


@pytest.mark.parametrize(("low", "value"), [("-10", -10.0), ("-.5", -0.5), ("-1e1", -10.0), ("-1.5E-3", -0.0015)])
def test_negative_numbers_are_values_and_not_flags(low, value):
    assert rl("--reward_clip_range", low, "1").rewards.reward_clip_range == (value, 1.0)


def test_numbers_may_have_an_exponent():
    assert rl("--actor_learning_rate", "5e-7").optimizer.actor_learning_rate == 5e-7


def test_the_error_for_a_wrong_number_names_the_flag_and_the_value():
    message = refusal(SFTConfig, "--zero_stage", "two")
    assert "--zero_stage" in message
    assert "'two'" in message


def test_a_wrong_choice_lists_the_choices():
    message = refusal(RLConfig, "--kl_estimator", "k4")
    assert all(word in message for word in ("--kl_estimator", "'k4'", "k1", "k2", "k3"))


def test_a_flag_without_its_value_is_named():
    assert "--pretrain" in refusal(SFTConfig, "--pretrain")


def test_line_breaks_survive_in_values():
    assert sft("--input_template", "User: {}\nAssistant: ").template.input_template == "User: {}\nAssistant: "


# unknown words


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("--zero-stage", "--zero_stage"),
        ("--train_batchsize", "--train_batch_size"),
        ("--flash_attention", "--flash_attn"),
        ("--ds.zero_stages", "--ds.zero_stage"),
        ("--learning_rates=1", "--learning_rate"),
    ],
)
def test_an_unknown_flag_suggests_the_most_similar_ones(given, nearest):
    message = refusal(SFTConfig, given, "3")
    assert "is not a flag of this command" in message
    assert nearest in message


def test_an_unknown_flag_without_a_similar_one_points_to_the_help():
    assert "--help" in refusal(SFTConfig, "--xyzzy")


def test_a_stray_word_is_shown():
    assert "'leftover'" in refusal(SFTConfig, "--packing_samples", "--pretrain", "m", "leftover")


# --config


def test_a_file_gives_flags_by_their_names(file):
    config = sft("--config", file("zero_stage: 3\npacking_samples: true\nlearning_rate: 1e-6\ndataset: a,b\n"))
    assert config == sft(
        *("--zero_stage", "3", "--packing_samples", "--learning_rate", "1e-6", "--dataset", "a,b"),
    )


def test_the_command_line_overrides_the_file_in_any_order(file):
    path = file("zero_stage: 3\npacking_samples: true\n")
    for argv in (["--zero_stage", "1", "--config", path], [f"--config={path}", "--zero_stage=1"]):
        config = sft(*argv, "--packing_samples", "false")
        assert (config.sharding.zero_stage, config.batches.packing_samples) == (1, False)


def test_the_later_of_two_files_wins(tmp_path):
    (tmp_path / "a.yaml").write_text("zero_stage: 3\nseed: 1")
    (tmp_path / "b.yaml").write_text("zero_stage: 1")
    config = sft("--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml"))
    assert (config.sharding.zero_stage, config.batches.seed) == (1, 1)


def test_nested_keys_read_as_dotted_names(file):
    nested = file("ds: {zero_stage: 3, lora: {rank: 8}}\nactor: {adam: {lr: 2e-6}, eps_clip: 0.1}")
    config = rl("--config", nested)
    assert config == rl(
        *("--ds.zero_stage", "3", "--ds.lora.rank", "8", "--actor.adam.lr", "2e-6", "--actor.eps_clip", "0.1")
    )


def test_a_file_may_hold_lists_negative_numbers_and_empty_values(file):
    config = rl("--config", file("reward_clip_range: [-5, 1.0e+1]\nstop: ['</s>', a b]\nmax_len:\nsave_steps: -1\n"))
    assert config.rewards.reward_clip_range == (-5.0, 10.0)
    assert config.rollout.stop == ("</s>", "a b")
    assert (config.rollout.max_len, config.checkpoints.save_steps) == (None, -1)


def test_a_file_may_hold_a_json_object(file):
    config = sft("--config", file("chat_template_kwargs: {enable_thinking: false}"))
    assert config.template.template_kwargs == {"enable_thinking": False}


def test_old_spellings_in_a_file_report_their_replacements(file, capsys):
    assert sft("--config", file("flash_attn: true")).model.attn_implementation == "flash_attention_2"
    assert "--flash_attn is now --attn_implementation flash_attention_2" in capsys.readouterr().err


def test_an_old_switch_that_a_file_turns_off_changes_nothing(file):
    assert sft("--config", file("flash_attn: false\nbf16: false")) == SFTConfig()


def test_an_unknown_key_names_the_file_and_the_nearest_flags(file):
    path = file("ds: {zero_stag: 3}")
    message = refusal(SFTConfig, "--config", path)
    assert path in message
    assert "--ds.zero_stag is not a flag" in message
    assert "--ds.zero_stage" in message


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [1", "is not YAML: line 1: expected ',' or ']'"),
        ("seed: 1\nds:\n  a: 1\n b: 2\n", "is not YAML: line 4: "),
        ("pretrain: 2026-13-01", "is not YAML: month must be in 1..12"),
        ("pretrain: " + "[" * 20_000, "nests too deeply"),
        ("ds: &ds\n  a: *ds\n", "nests too deeply"),
        ("just words", "contains no flags"),
        ("", "contains no flags"),
        ("- a\n- b", "contains no flags"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_rejected_in_one_line(file, text, complaint):
    path = file(text)
    message = refusal(SFTConfig, "--config", path)
    assert path in message
    assert complaint in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_is_rejected(tmp_path):
    assert "nowhere.yaml: no such file" in refusal(SFTConfig, "--config", str(tmp_path / "nowhere.yaml"))
    (tmp_path / "sft_run.yaml").touch()
    mistyped = refusal(SFTConfig, "--config", str(tmp_path / "sft_rum.yaml"))
    assert mistyped.endswith(f"sft_rum.yaml: no such file. Try: {tmp_path / 'sft_run.yaml'}")
    assert f"{tmp_path} cannot be read" in refusal(SFTConfig, "--config", str(tmp_path))
    (tmp_path / "image.yaml").write_bytes(b"\xff\xfe\xff")
    assert "is not YAML" in refusal(SFTConfig, "--config", str(tmp_path / "image.yaml"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("seed: 1\nzero_stage: two\n", ", line 2: --zero_stage: invalid int value: 'two'"),
        ("seed: 1\nds:\n  zero_stage: two\n", ", line 3: --zero_stage: invalid int value: 'two'"),
        ("# comment\n\noptim: adamw\n", ", line 3: --optim: expected adam or muon, got 'adamw'. Try: --optim adam"),
        ("packing_samples: perhaps\n", ", line 1: --packing_samples: expected true, false or no value"),
        ("adam_betas: 0.9\n", ", line 1: --adam_betas: expected 2 arguments"),
        ("seed: 1\nzero_stage: [1, 2]\n", ", line 2: --zero_stage: expected one value, got [1, 2]"),
        ("lr: 1\nseed: 1\nepochs: 2\n", ", lines 1 and 3: --lr and --epochs are not flags of this command. Try: --l"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_and_the_line(file, text, complaint):
    path = file(text)
    assert refusal(SFTConfig, "--config", path).startswith(f"in --config {path}{complaint}")


# the environment


def test_old_environment_variables_set_flags_and_are_reported(capsys):
    config = rl(environ={"OPENRLHF_ASYNC_QUEUE_SIZE": "3", "OPENRLHF_ASYNC_NUM_TASKS": "64"})
    assert (config.asynchrony.async_queue_size, config.rewards.max_episodes_per_engine) == (3, 64)
    said = capsys.readouterr().err
    assert "OPENRLHF_ASYNC_QUEUE_SIZE is now --async_queue_size" in said
    assert "OPENRLHF_ASYNC_NUM_TASKS is now --max_episodes_per_engine" in said


def test_flags_and_files_override_the_environment(file):
    environ = {"OPENRLHF_ASYNC_QUEUE_SIZE": "3"}
    assert rl("--async_queue_size", "5", environ=environ).asynchrony.async_queue_size == 5
    assert rl("--config", file("async_queue_size: 7"), environ=environ).asynchrony.async_queue_size == 7


def test_the_environment_of_another_command_is_ignored(capsys):
    assert parse(SFTConfig, [], environ={"OPENRLHF_ASYNC_QUEUE_SIZE": "3"}) == SFTConfig()
    assert capsys.readouterr().err == ""


def test_a_wrong_value_in_the_environment_names_its_variable(capsys):
    with pytest.raises(ConfigError):
        rl(environ={"OPENRLHF_ASYNC_QUEUE_SIZE": "many"})
    assert "OPENRLHF_ASYNC_QUEUE_SIZE" in capsys.readouterr().err


# configs


def test_a_config_is_frozen_in_every_part():
    config = SFTConfig()
    with pytest.raises(FrozenInstanceError):
        config.batches.seed = 1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        config.batches = config.batches  # type: ignore[misc]


def test_replacing_flags_finds_their_sections_and_leaves_the_original():
    config = SFTConfig()
    changed = replace_flags(config, seed=1, zero_stage=3)
    assert (changed.batches.seed, changed.sharding.zero_stage) == (1, 3)
    assert config == SFTConfig()
    assert replace_flags(changed, seed=42, zero_stage=2) == config


def test_flag_values_are_the_flags_by_name():
    values = flag_values(sft("--seed", "7"))
    assert values.keys() == flags_of(SFTConfig).keys()
    assert values["seed"] == 7


@pytest.mark.parametrize("command", COMMANDS)
def test_printing_every_flag_and_parsing_it_again_changes_nothing(command):
    config = COMMANDS[command]()
    argv = []
    for name, value in flag_values(config).items():
        if value is not None and not flags_of(COMMANDS[command])[name].positional:
            argv += [f"--{name}", *map(str, value)] if isinstance(value, tuple) else [f"--{name}={value}"]
    assert parse(COMMANDS[command], argv, environ={}) == config


# positional arguments


@pytest.mark.parametrize(
    "words",
    [
        "a b --port 80 --open",
        "--port 80 --open a b",
        "--open true a --port 80 b",
        "a --open b --port=80",
        "--port 80 a --open=yes b",
    ],
)
def test_positional_arguments_may_be_anywhere(words):
    config = parse(COMMANDS["view"], words.split(), environ={})
    assert (config.runs.run_dirs, config.page.port, config.page.open) == (("a", "b"), 80, True)


def test_positional_arguments_and_flags_are_not_mixed_up(file):
    assert refusal(COMMANDS["view"], "--run_dirs", "a").startswith("--run_dirs is not a flag of this command")
    assert (
        refusal(COMMANDS["view"], "a", "--run_dir")
        == "--run_dir is not a flag of this command. Try: --help all for all flags"
    )
    assert "run_dirs is not a flag" in refusal(COMMANDS["view"], "--config", file("run_dirs: [a]"))
    assert parse(COMMANDS["view"], ["a", "--config", file("open: true")], environ={}).page.open is True
    assert refusal(SFTConfig, "a") == "expected a flag, got 'a'. Try: put quotes around values with spaces"
    assert refusal(SFTConfig, "/tmp") == "expected a flag, got '/tmp'. Try: --pretrain /tmp"


def test_help_shows_positional_arguments_in_the_usage():
    text = help_text(COMMANDS["view"], build_parser(COMMANDS["view"], "openrlhf view"))
    assert text.startswith("usage: openrlhf view RUN_DIR ... [--flag value ...]\n")


def test_a_list_in_a_file_is_joined_by_commas_for_a_text_flag(tmp_path):
    (tmp_path / "run.yaml").write_text("dataset: [a/b, c/d]\ndata.chosen_key: good\ntarget_modules: [q_proj, v_proj]\n")
    config = parse(RMConfig, ["--config", str(tmp_path / "run.yaml")])
    assert config.data.dataset == "a/b,c/d"
    assert config.fields.chosen_key == "good"
    assert config.lora.target_modules == ("q_proj", "v_proj")
