"""Names of other frameworks: the error names our flag, value or command, and says where the meaning differs."""

import shlex
from typing import get_args

import pytest

from openrlhf.cli.main import SUMMARIES
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flags_of, without_none
from openrlhf.config.parser import parse
from openrlhf.config.suggestions import CHOICES, COMMAND_LINES, SUGGESTIONS, suggest_commands
from openrlhf.errors import ConfigError

TYPED = [  # command, typed flag, suggested flag and note
    ("train_sft", "model_name_or_path", "--pretrain"),
    ("serve_rm", "model_name_or_path", "--reward_pretrain"),
    ("train_sft", "per_device_train_batch_size", "--micro_train_batch_size (samples per device; --train_batch_size is"),
    ("train_ppo", "gradient_accumulation_steps", "--train_batch_size (samples per step = micro_train_batch_size x"),
    ("train_dpo", "batch_size", "--train_batch_size (samples per optimizer step over all devices"),
    ("train_sft", "num_train_epochs", "--max_epochs (passes over the data)"),
    ("train_ppo", "num_train_epochs", "--num_episodes (passes over the data)"),
    ("train_sft", "output_dir", "--save_path"),
    ("batch_inference", "output_dir", "--output_path"),
    ("train_sft", "max_seq_length", "--max_len"),
    ("train_sft", "lr", "--learning_rate"),
    ("train_ppo", "lr", "--actor_learning_rate"),
    ("train_ppo", "learning_rate", "--actor_learning_rate (the critic has --critic_learning_rate)"),
    ("train_kto", "epochs", "--max_epochs (passes over the data)"),
    ("interactive_chat", "max_new_tokens", "--max_len (tokens of prompt and response together)"),
    ("train_ppo", "num_generations", "--n_samples_per_prompt"),
    ("batch_inference", "num_return_sequences", "--best_of_n"),
    ("train_ppo", "beta", "--init_kl_coef (weight of the KL to the reference)"),
    ("train_sft", "lora_r", "--lora_rank"),
    ("train_sft", "cutoff_len", "--max_len"),
    ("train_sft", "warmup_steps", "--lr_warmup_ratio (a share of the steps"),
    ("train_ppo", "reward_funcs", "--remote_rm_url (a .py file with reward_func)"),
    ("train_ppo", "actor_rollout_ref.rollout.n", "--n_samples_per_prompt"),
    ("train_ppo", "data.train_batch_size", "--rollout_batch_size (prompts per rollout)"),
    ("train_ppo", "algorithm.adv_estimator", "--advantage_estimator (group_norm is GRPO, gae is PPO)"),
    ("train_sft", "report_to", "--use_wandb (or --use_tensorboard FOLDER)"),
]


@pytest.mark.parametrize(("command", "typed", "suggested"), TYPED)
def test_a_name_used_elsewhere_gets_our_flag(command, typed, suggested):
    with pytest.raises(ConfigError) as caught:
        parse(COMMANDS[command], [f"--{typed}", "1"], environ={})
    start = f"--{typed} is not a flag of this command. Try: {suggested}"
    assert str(caught.value).startswith(start)
    assert len(str(caught.value)) == len(start) or "(" in suggested


def test_every_row_suggests_a_flag_that_some_command_has_for_each_of_its_names():
    for item in SUGGESTIONS:
        for name in item.names.split():
            commands = [flags_of(command) for command in COMMANDS.values() if name not in flags_of(command)]
            for flag in item.flags.split():
                assert any(flag in flags for flags in commands), f"--{name} is never answered with --{flag}"


def test_no_name_is_in_two_rows_with_the_same_flag():
    pairs = [(name, flag) for item in SUGGESTIONS for name in item.names.split() for flag in item.flags.split()]
    assert len(pairs) == len(set(pairs))


def test_a_key_of_a_file_gets_the_same_answer(tmp_path):
    (tmp_path / "run.yaml").write_text("num_train_epochs: 3\n")
    with pytest.raises(ConfigError, match="Try: --max_epochs"):
        parse(COMMANDS["train_sft"], ["--config", str(tmp_path / "run.yaml")], environ={})


LLAMA_FACTORY = """
model_name_or_path: ./model
stage: dpo
do_train: true
lora_rank: 8
lora_target: all
pref_beta: 0.1
overwrite_cache: true
"""


def test_a_file_of_llama_factory_is_answered_key_by_key(tmp_path):
    (tmp_path / "run.yaml").write_text(LLAMA_FACTORY)
    with pytest.raises(ConfigError) as caught:
        parse(COMMANDS["train_dpo"], ["--config", str(tmp_path / "run.yaml")], environ={})
    assert str(caught.value).endswith(
        "lines 2, 3, 4, 6, 7 and 8: --model_name_or_path, --stage, --do_train, --lora_target, --pref_beta and"
        " --overwrite_cache are not flags of this command. Try: "
        "\n  --pretrain instead of --model_name_or_path"
        "\n  --target_modules instead of --lora_target"
        "\n  --beta instead of --pref_beta"
        "\n  leave out --stage, --do_train, --overwrite_cache"
    )


def refusal(command, *argv):
    with pytest.raises(ConfigError) as caught:
        parse(COMMANDS[command], argv, environ={})
    return str(caught.value)


def test_all_unknown_flags_are_reported_together():
    assert refusal("train_sft", "--do_train").endswith("Try: leave it out, since nothing here needs it")
    assert refusal("train_sft", "--lr", "1e-5", "--seed", "1", "-epochs", "2", "--xyzzy", "-1", "--zero=3") == (
        "--lr, -epochs, --xyzzy and --zero are not flags of this command. Try: "
        "\n  --learning_rate instead of --lr"
        "\n  --max_epochs (passes over the data) instead of -epochs"
        "\n  --zero_stage instead of --zero"
        "\n  --help all for all flags"
    )
    assert refusal("train_sft", "--lr", "1e-5", "--epochs", "2").endswith(
        "Try: --learning_rate instead of --lr; --max_epochs (passes over the data) instead of --epochs"
    )


def test_only_flags_that_are_nearly_as_similar_as_the_nearest_are_suggested():
    assert refusal("train_sft", "--lerning_rate", "1e-5").endswith("Try: --learning_rate")
    assert refusal("train_sft", "--savepath", "x").endswith("Try: --save_path")
    assert refusal("train_dpo", "--logging_first_step").endswith("Try: --logging_steps")  # not --logger.logging_steps


def test_losses_of_trl_are_answered_by_command():
    assert refusal("train_dpo", "--loss_type", "ipo").endswith("Try: --ipo (a switch; sigmoid is the default)")
    assert "Try: --loss_agg_mode" in refusal("train_ppo", "--loss_type", "dr_grpo")


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("--advantage_estimator grpo", "--advantage_estimator group_norm"),
        ("--advantage_estimator GRPO", "--advantage_estimator group_norm"),
        ("--advantage_estimator=reinforce++", "--advantage_estimator reinforce"),
        ("--advantage_estimator REINFORCE++-baseline", "--advantage_estimator reinforce_baseline"),
        ("--advantage_estimator 'Dr. GRPO'", "--advantage_estimator dr_grpo"),
        ("--advantage_estimator dr_grpo_loss", "--advantage_estimator dr_grpo"),
        ("--advantage_estimator ppo", "--advantage_estimator gae"),
        ("--advantage_estimator xyzzy", "openrlhf train_ppo --help advantage_estimator"),
        ("--policy_loss_type grpo", "--advantage_estimator group_norm"),
        ("--param_dtype bfloat16", "--param_dtype bf16"),
        ("--kl_estimator low_var_kl", "--kl_estimator k3"),
        ("--algo grpo", "--advantage_estimator group_norm"),
        ("--algorithm.adv_estimator=reinforce_plus_plus", "--advantage_estimator reinforce"),
        ("--dtype torch.float16", "--param_dtype fp16"),
    ],
)
def test_a_value_used_elsewhere_gets_ours(typed, written):
    with pytest.raises(ConfigError) as caught:
        parse(COMMANDS["train_ppo"], shlex.split(typed), prog="openrlhf train_ppo", environ={})
    assert caught.value.try_this == written


def test_every_value_is_answered_with_flags_that_parse():
    for flag, answers in CHOICES.items():
        for value, written in answers.items():
            choices = get_args(without_none(flags_of(COMMANDS["train_ppo"])[flag].type))
            assert value not in choices
            parse(COMMANDS["train_ppo"], written.split(), environ={})


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("sft", ["train_sft"]),
        ("train sft", ["train_sft"]),
        ("grpo --pretrain x", ["train_ppo --advantage_estimator group_norm"]),
        ("train-grpo", ["train_ppo --advantage_estimator group_norm"]),
        ("GRPO", ["train_ppo --advantage_estimator group_norm"]),
        ("chat", ["interactive_chat"]),
        ("train_dpoo", ["train_dpo"]),
        ("xyzzy", []),
    ],
)
def test_a_command_used_elsewhere_gets_ours(typed, written):
    assert suggest_commands(typed.split(), SUMMARIES)[:1] == written


def test_every_command_line_names_a_command_and_parses():
    for name, line in COMMAND_LINES.items():
        command, *argv = line.removeprefix("preview ").split()
        assert name not in SUMMARIES
        parse(COMMANDS[command], argv, environ={})
