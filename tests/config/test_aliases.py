"""Old and dotted spellings give the flags that they stand for."""

import pytest

from openrlhf.config.aliases import DOTTED, RENAMED
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flag_values, flags_of
from openrlhf.config.parser import parse

OLD = [  # command, given flags, the printed line, the current flag, its value
    ("train_sft", "--bf16", "--bf16 is now --param_dtype bf16", "param_dtype", "bf16"),
    (
        "train_rm",
        "--flash_attn",
        "--flash_attn is now --attn_implementation flash_attention_2",
        "attn_implementation",
        "flash_attention_2",
    ),
    (
        "train_ppo_ray",
        "--use_icepop",
        "--use_icepop is now --vllm_is_correction_type icepop",
        "vllm_is_correction_type",
        "icepop",
    ),
    ("train_ppo_ray", "--use_kl_estimator_k3", "is now --kl_estimator k3", "kl_estimator", "k3"),
    (
        "train_rm",
        "--value_prefix_head value_head",
        "--value_prefix_head is now --value_head_prefix",
        "value_head_prefix",
        "value_head",
    ),
    ("train_sft", "--wandb token", "--wandb is now --use_wandb", "use_wandb", "token"),
    ("train_sft", "--train_split dev", "--train_split is now --dataset_split", "dataset_split", "dev"),
    (
        "train_ppo_ray",
        "--rollout_micro_batch_size 2",
        "--rollout_micro_batch_size is now --micro_rollout_batch_size",
        "micro_rollout_batch_size",
        2,
    ),
    (
        "train_ppo_ray",
        "--n_samples_per_prompts 4",
        "--n_samples_per_prompts is now --n_samples_per_prompt",
        "n_samples_per_prompt",
        4,
    ),
    (
        "train_ppo_ray",
        "--vllm_enable_is_correction",
        "--vllm_enable_is_correction is now --enable_vllm_is_correction",
        "enable_vllm_is_correction",
        True,
    ),
    (
        "train_sft",
        "--universal_ckpt",
        "--universal_ckpt is now --use_ds_universal_ckpt",
        "use_ds_universal_ckpt",
        True,
    ),
    ("train_rm", "--muon.no_nesterov", "is now --muon_nesterov false", "muon_nesterov", False),
    ("train_ppo_ray", "--actor.muon.no_nesterov", "is now --muon_nesterov false", "muon_nesterov", False),
    ("train_ppo_ray", "--critic.muon.no_nesterov", "--critic_muon_nesterov false", "critic_muon_nesterov", False),
]


def flat_name(command, dotted):
    """The flag of a command that a dotted name stands for."""
    flags = flags_of(COMMANDS[command])
    return dotted if dotted in flags else next((flat for flat in DOTTED.get(dotted, ()) if flat in flags), None)


@pytest.mark.parametrize(("command", "typed", "line", "flag", "value"), OLD, ids=lambda item: str(item).split()[0])
def test_an_old_spelling_sets_the_current_flag_and_reports_it(command, typed, line, flag, value, capsys):
    config = parse(COMMANDS[command], typed.split(), environ={})
    assert flag_values(config)[flag] == value
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_every_old_spelling_is_tested_above():
    assert {typed.split()[0].removeprefix("--") for _, typed, *_ in OLD} == RENAMED.keys()


def test_an_old_spelling_may_have_an_equals_sign(capsys):
    assert parse(COMMANDS["train_rm"], ["--value_prefix_head=v"], environ={}).head.value_head_prefix == "v"
    assert "--value_head_prefix" in capsys.readouterr().err


def test_a_repeated_old_spelling_is_explained_once(capsys):
    parse(COMMANDS["train_sft"], ["--bf16", "--bf16"], environ={})
    assert capsys.readouterr().err.count("--bf16") == 1


def test_dotted_names_need_no_explanation(capsys):
    parse(COMMANDS["train_sft"], ["--ds.zero_stage", "3"], environ={})
    assert capsys.readouterr().err == ""


def test_every_target_of_the_dotted_table_is_a_flag():
    everything = {name for command in COMMANDS.values() for name in flags_of(command)}
    assert {flat for targets in DOTTED.values() for flat in targets} <= everything


def test_a_dotted_name_takes_switches_values_lists_and_equals_signs():
    dotted = "--ds.packing_samples --ds.zero_stage=3 --ds.lora.target_modules q v --train.seed 1"
    flat = "--packing_samples --zero_stage=3 --target_modules q v --seed 1"
    command = COMMANDS["train_sft"]
    assert parse(command, dotted.split(), environ={}) == parse(command, flat.split(), environ={})


def test_a_dotted_name_may_be_a_different_flag_in_each_command():
    assert flat_name("train_dpo", "ref.offload") == "ref_offload"
    assert flat_name("train_ppo_ray", "ref.offload") == "ref_reward_offload"


def test_actor_and_critic_have_separate_optimizers():
    argv = [
        "--actor.adam.lr",
        "1e-6",
        "--critic.adam.lr",
        "2e-6",
        "--actor.adam.betas",
        "0.9",
        "0.99",
        "--critic.optim",
        "muon",
    ]
    optimizer = parse(COMMANDS["train_ppo_ray"], argv, environ={}).optimizer
    assert (optimizer.actor_learning_rate, optimizer.critic_learning_rate) == (1e-6, 2e-6)
    assert (optimizer.adam_betas, optimizer.critic_adam_betas) == ((0.9, 0.99), None)
    assert (optimizer.optim, optimizer.critic_optim) == ("adam", "muon")


@pytest.mark.parametrize(
    ("typed", "flag", "value"),
    [
        ("--vllm_is_correction_type mis", "vllm_is_correction_type", "seq-mask-tis"),
        ("--actor.loss_agg_mode=seq-mean-token-mean", "loss_agg_mode", "seq-mean"),
    ],
)
def test_an_old_value_reports_its_replacement(typed, flag, value, capsys):
    assert flag_values(parse(COMMANDS["train_ppo_ray"], typed.split(), environ={}))[flag] == value
    assert capsys.readouterr().err.endswith(f" is now {value}\n")


def test_the_critic_has_its_own_muon(capsys):
    argv = ["--critic.muon.no_nesterov", "--critic.muon.ns_steps", "3", "--actor.muon.ns_steps", "6"]
    optimizer = parse(COMMANDS["train_ppo_ray"], argv, environ={}).optimizer
    assert (optimizer.muon_nesterov, optimizer.critic_muon_nesterov) == (True, False)
    assert (optimizer.muon_ns_steps, optimizer.critic_muon_ns_steps) == (6, 3)
