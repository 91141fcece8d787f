"""Flags of other frameworks: the error names our flag, and says where the meaning differs."""

import pytest

from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flags_of
from openrlhf.config.parser import parse
from openrlhf.config.suggestions import SUGGESTIONS
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
