"""Old and dotted spellings give the flags that they stand for."""

import pytest

from openrlhf.config.aliases import DOTTED, RENAMED
from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flag_values, flags_of
from openrlhf.config.parser import parse

OLD = [  # command, what is typed, the line, the flag, its value
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
]

SUPERVISED = ("train_sft", "train_rm", "train_dpo")
RL = ("train_ppo_ray",)
ANY = (*SUPERVISED, *RL)


def names(prefix, *endings):
    return [f"{prefix}.{ending}" for ending in endings]


OPTIMIZER = (
    *("adam.lr", "adam.betas", "adam.weight_decay", "adam.eps", "optim"),
    *("muon.lr", "muon.momentum", "muon.ns_steps", "muon.nesterov"),
    *("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm"),
)
UPSTREAM = {  # which commands must know a dotted name of 0.10.2 and later
    SUPERVISED: [
        "model.model_name_or_path",
        *OPTIMIZER,
        *names("data", "dataset", "max_len", "max_samples", "apply_chat_template", "input_template"),
    ],
    ("train_sft",): ["data.input_key", "data.output_key", "data.multiturn", "model.pretrain_mode_enable"],
    ("train_rm",): [
        *names("model", "loss_type", "margin_loss_enable", "compute_fp32_loss_enable"),
        "ds.value_head_prefix",
    ],
    ("train_dpo",): names("model", "ipo_enable", "beta", "label_smoothing", "nll_loss_coef"),
    ("train_rm", "train_dpo"): names("data", "prompt_key", "chosen_key", "rejected_key"),
    ANY: [
        *("ckpt.output_dir", "ckpt.path", "ckpt.save_steps", "ckpt.save_hf", "ckpt.disable_ds"),
        *("ckpt.max_num", "ckpt.max_mem", "ckpt.load_enable"),
        *names("logger.wandb", "key", "org", "group", "project", "run_name"),
        *("logger.tensorboard_dir", "logger.logging_steps"),
        *("eval.dataset", "eval.steps", "eval.split"),
        *names("ds", "zero_stage", "param_dtype", "zpg", "adam_offload", "attn_implementation", "use_liger_kernel"),
        *names("ds", "grad_accum_dtype", "overlap_comm", "deepcompile", "packing_samples", "load_in_4bit"),
        *names("ds", "tensor_parallel_size", "ring_attn_size", "ring_attn_head_stride", "use_universal_ckpt"),
        *names("ds.lora", "rank", "alpha", "dropout", "target_modules"),
        "ds.experts_implementation",
        *names("train", "batch_size", "micro_batch_size", "max_epochs", "seed", "full_determinism_enable"),
    ],
    RL: [
        *names("actor", *OPTIMIZER),
        *names("critic", *OPTIMIZER),
        *(f"{role}.model_name_or_path" for role in ("actor", "critic", "ref", "reward")),
        *("reward.remote_url", "train.agent_func_path", "ds.value_head_prefix"),
        *(f"{role}.num_nodes" for role in ("actor", "critic", "ref", "reward")),
        *(f"{role}.num_gpus_per_node" for role in ("actor", "critic", "ref", "reward")),
        *names("train", "colocate_all", "colocate_actor_ref", "colocate_critic_reward"),
        *("ref.offload", "reward.offload"),
        *names("vllm", "num_engines", "tensor_parallel_size", "sync_backend", "sync_with_ray"),
        *names("vllm", "enable_prefix_caching", "enforce_eager", "enable_sleep", "gpu_memory_utilization"),
        "ds.enable_sleep",
        *names("train", "num_episodes", "ema_beta", "enable_ema", "async_enable", "partial_rollout_enable"),
        *names("train", "dynamic_batch_enable", "max_tokens_per_gpu"),
        *names("rollout", "batch_size", "micro_batch_size", "n_samples_per_prompt", "temperature", "top_p"),
        *names("rollout", "max_new_tokens", "vllm_generate_batch_size", "max_tokens_per_gpu"),
        *names("algo.advantage", "estimator", "gamma", "lambd", "no_std_norm"),
        *names("algo.advantage", "is_correction_enable", "is_correction_threshold", "is_correction_type"),
        *names("algo.kl", "init_coef", "target", "horizon", "estimator", "use_loss"),
        *names("algo", "dynamic_filtering_enable", "dynamic_filtering_range"),
        *names("actor", "eps_clip", "eps_clip_low_high", "dual_clip", "policy_loss_type", "aux_loss_coef"),
        *("actor.entropy_coef", "critic.value_clip", "critic.save_value_network", "critic.freezing_steps"),
        *names("reward", "normalize_enable", "clip_range", "overlong_buffer_len", "overlong_penalty_factor"),
        "reward.stop_properly_penalty_coef",
        *names("data", "prompt_dataset", "input_key", "label_key", "max_len", "max_samples"),
        *names("data", "input_template", "apply_chat_template"),
        *("eval.temperature", "eval.n_samples_per_prompt", "ckpt.best_metric_key"),
    ],
}


def flat_name(command, dotted):
    """The flag of a command that a dotted name stands for."""
    flags = flags_of(COMMANDS[command])
    return dotted if dotted in flags else next((flat for flat in DOTTED.get(dotted, ()) if flat in flags), None)


@pytest.mark.parametrize(("command", "typed", "line", "flag", "value"), OLD, ids=lambda item: str(item).split()[0])
def test_an_old_spelling_gives_the_value_and_says_what_it_became(command, typed, line, flag, value, capsys):
    config = parse(COMMANDS[command], typed.split(), environ={})
    assert flag_values(config)[flag] == value
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_every_old_spelling_is_tried_above():
    assert {typed.split()[0].removeprefix("--") for _, typed, *_ in OLD} == RENAMED.keys()


def test_an_old_spelling_takes_an_equals_sign(capsys):
    assert parse(COMMANDS["train_rm"], ["--value_prefix_head=v"], environ={}).head.value_head_prefix == "v"
    assert "--value_head_prefix" in capsys.readouterr().err


def test_an_old_spelling_is_explained_once_however_often_it_stands(capsys):
    parse(COMMANDS["train_sft"], ["--bf16", "--bf16"], environ={})
    assert capsys.readouterr().err.count("--bf16") == 1


def test_dotted_names_need_no_explanation(capsys):
    parse(COMMANDS["train_sft"], ["--ds.zero_stage", "3"], environ={})
    assert capsys.readouterr().err == ""


def test_every_target_of_the_dotted_table_is_a_flag():
    everything = {name for command in COMMANDS.values() for name in flags_of(command)}
    assert {flat for targets in DOTTED.values() for flat in targets} <= everything


@pytest.mark.parametrize("commands", UPSTREAM, ids=" ".join)
def test_the_dotted_names_of_upstream_are_understood(commands):
    for command in commands:
        assert [dotted for dotted in UPSTREAM[commands] if flat_name(command, dotted) is None] == []


def test_a_dotted_name_takes_switches_values_lists_and_equals_signs():
    dotted = "--ds.packing_samples --ds.zero_stage=3 --ds.lora.target_modules q v --train.seed 1"
    flat = "--packing_samples --zero_stage=3 --target_modules q v --seed 1"
    command = COMMANDS["train_sft"]
    assert parse(command, dotted.split(), environ={}) == parse(command, flat.split(), environ={})


def test_one_dotted_name_may_be_two_flags_in_two_commands():
    assert flat_name("train_dpo", "ref.offload") == "ref_offload"
    assert flat_name("train_ppo_ray", "ref.offload") == "ref_reward_offload"


def test_actor_and_critic_have_optimizers_of_their_own():
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


def test_inert_flags_are_accepted_and_give_one_line(workspace):
    argv = ["--pretrain", "./model", "--prompt_data", "./data.jsonl", "--remote_rm_url", "./reward.py"]
    lines = []
    config = parse(COMMANDS["train_ppo"], [*argv, "--ptx_coef", "0.05", "--perf", "--actor_init_on_gpu"], environ={})
    check(config, lines.append)
    assert lines == ["accepted without effect: --ptx_coef, --perf, --actor_init_on_gpu"]
