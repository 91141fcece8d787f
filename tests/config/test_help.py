"""The output of --help: the essential flags, all of them, a section, a word, or one flag in full."""

import re
import shlex

import pytest

from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS, PRMConfig, RLConfig, SFTConfig
from openrlhf.config.flags import flags_of, summary_of, typical_use
from openrlhf.config.help import MORE, asked_topic, help_text
from openrlhf.config.parser import build_parser, parse_given
from openrlhf.errors import ConfigError

FOLDERS = ("model", "sft", "rm", "grpo", "student", "teacher", "base")
FILES = ("reward.py", *(f"{name}.jsonl" for name in ("chats", "pairs", "labelled", "answers", "steps", "prompts")))
MOST = 31  # essential flags of a command: they fit on two screens


def shown(command, topic=""):
    return help_text(COMMANDS[command], build_parser(COMMANDS[command], f"openrlhf {command}"), topic)


def flags_in(text):
    """Return the flags and positional arguments that a help text lists, by name."""
    places = {"RUN_DIR": "run_dirs"}
    found = re.findall(r"^  (?:--(\w+)|([A-Z_]+))\b", text, re.MULTILINE)
    return [flag or places[place] for flag, place in found if flag or place in places]


@pytest.fixture
def typical_files(tmp_path, monkeypatch):
    """Change to a folder with every file that a typical command line names."""
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for file in FILES:
        (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_a_typical_command_line_and_the_essential_flags(command):
    text, flags = shown(command), flags_of(COMMANDS[command])
    essential = [name for name, item in flags.items() if item.essential or item.required]
    assert sorted(flags_in(text)) == sorted(["config", *essential])
    assert 2 <= len(essential) <= MOST
    assert summary_of(COMMANDS[command]) in text
    assert text.partition("typical use:\n")[2].startswith(f"  openrlhf {command}")
    assert max(map(len, text.splitlines())) <= 120
    if len(essential) < len(flags):
        assert text.splitlines()[-1] == f"{len(essential)} of {len(flags)} flags. {MORE}"


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "init"])  # tests/cli/test_starter.py
@pytest.mark.usefixtures("typical_files")
def test_the_typical_command_line_parses_and_passes_the_checks(command, capsys):
    config = COMMANDS[command]
    program, name, *argv = shlex.split(typical_use(config, f"openrlhf {command}").replace("\\\n", ""))
    assert (program, name) == ("openrlhf", command)
    parsed, given = parse_given(config, argv, environ={})
    check(parsed, given=given)
    assert "has no effect" not in capsys.readouterr().err


def test_the_sections_of_required_flags_come_first():
    shown_flags = flags_in(shown("train_ppo"))
    assert shown_flags.index("pretrain") < shown_flags.index("prompt_data") < shown_flags.index("train_batch_size")


def test_without_an_example_the_required_flags_are_typical():
    class Undocumented(SFTConfig):
        """A command without an example."""

    assert typical_use(Undocumented, "openrlhf new") == "openrlhf new --pretrain ./model --dataset ./data.jsonl"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_mentions_every_flag_under_a_heading(command):
    text = shown(command, "all")
    lines = [line.strip() for line in text.splitlines()]
    assert set(flags_in(text)) == {"config", *flags_of(COMMANDS[command])}
    assert {f"{item.title}:" for item in flags_of(COMMANDS[command]).values()} <= set(lines)
    assert max(map(len, lines)) <= 120


def test_help_shows_defaults_that_are_zero_and_omits_those_that_are_unset():
    text = " ".join(help_text(PRMConfig, build_parser(PRMConfig, "openrlhf train_prm"), "all").split())
    assert "0 trains all weights (default: 0)" in text
    assert "values up to 1e-8 disable it (default: 0.0)." in text
    assert "(default: prm_%s)" in text
    assert "(default: )" not in text
    assert "(default: False)" not in text


def test_help_shows_where_a_default_with_spaces_ends():
    text = " ".join(shown("train_sft").split())
    assert r"(default: 'User: {}\nAssistant: ')" in text


def test_a_section_is_shown_with_flags_elsewhere_that_contain_its_name():
    assert flags_in(shown("train_sft", "lora")) == ["lora_rank", "lora_alpha", "lora_dropout", "target_modules"]
    assert flags_in(shown("train_sft", "LoRA")) == flags_in(shown("train_sft", "lora"))
    vllm = flags_in(shown("train_ppo", "vllm"))
    assert {"vllm_num_engines", "enforce_eager", "vllm_generate_batch_size"} <= set(vllm)
    assert flags_in(shown("train_ppo", "checkpoints"))[0] == "save_path"


def test_a_word_shows_the_flags_that_mention_it():
    text = shown("train_sft", "wandb")
    assert set(flags_in(text)) == {name for name in flags_of(SFTConfig) if "wandb" in name}
    warm_up = flags_in(shown("train_sft", "warm-up"))
    assert warm_up == ["lr_warmup_ratio"]


def test_a_flag_is_shown_in_full():
    text = shown("train_ppo", "kl_horizon")
    assert text.startswith("--kl_horizon\n  Number of samples over which the weight adapts.\n")
    assert "default   10000" in text
    assert "range     above 0" in text
    assert "needs     --kl_target" in text
    assert "also      --algo.kl.horizon" in text
    assert "choices   ppo, gspo" in shown("train_ppo", "policy_loss_type")
    assert "default   false" in shown("train_sft", "packing_samples")
    assert "required  yes; for example --pretrain ./model" in shown("train_sft", "--pretrain")


def test_an_older_spelling_shows_the_flag_that_replaces_it():
    assert shown("train_sft", "ds.zero_stage") == shown("train_sft", "zero_stage")
    assert shown("train_rm", "value_prefix_head") == shown("train_rm", "value_head_prefix")


def test_a_name_of_another_framework_shows_our_flag():
    text = shown("train_ppo", "num_generations")
    assert text.startswith("num_generations in other frameworks: --n_samples_per_prompt\n\n")
    assert text.endswith(shown("train_ppo", "n_samples_per_prompt"))
    named_twice = shown("train_ppo", "beta")  # also a part of our names
    assert {"ema_beta", "adam_betas", "init_kl_coef"} <= set(flags_in(named_twice))
    assert "beta in other frameworks: --init_kl_coef (weight of the KL to the reference)" in named_twice


def test_every_flag_can_be_shown_in_full():
    for name in flags_of(RLConfig):
        assert shown("train_ppo_ray", name).startswith(f"--{name}\n")


def test_an_unknown_topic_suggests_a_similar_one():
    with pytest.raises(ConfigError, match=r"mentions 'lorra'. Try: openrlhf train_sft --help lora"):
        shown("train_sft", "lorra")
    with pytest.raises(ConfigError, match="Try: openrlhf train_sft --help all"):
        shown("train_sft", "xyzzy")


@pytest.mark.parametrize(
    ("argv", "topic"),
    [
        ([], None),
        (["--pretrain", "x"], None),
        (["--help"], ""),
        (["-h"], ""),
        (["--pretrain", "x", "--help"], ""),
        (["--help", "lora"], "lora"),
        (["--help=lora"], "lora"),
        (["--help", "--pretrain", "x"], ""),
    ],
)
def test_the_topic_is_the_word_after_help(argv, topic):
    assert asked_topic(argv) == topic
