"""Messages about flags without effect: the runs that print them, and runs that do not."""

import shlex

import pytest
from test_checks import VALID

from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse_given
from openrlhf.errors import ConfigError


def said(command, added, monkeypatch=None):
    lines = []
    config, given = parse_given(COMMANDS[command], shlex.split(f"{VALID[command]} {added}"), environ={})
    check(config, lines.append, given)
    return [line for line in lines if "no effect" in line]


SAID = {  # command and flags -> the line
    "train_sft --zero_stage 2": "--zero_stage 2 has no effect in one process",
    "train_rm --zero_stage 3 --zpg 2 --overlap_comm --grad_accum_dtype fp32": (
        "--zero_stage 3, --zpg 2, --overlap_comm and --grad_accum_dtype fp32 have no effect in one process"
    ),
    "train_ppo_ray --zero_stage 2": "--zero_stage 2 has no effect in one process",
    "train_ppo_ray --runtime ray --actor_num_gpus_per_node 1 --zpg 2 --init_kl_coef 0 "
    "--advantage_estimator rloo --n_samples_per_prompt 2": "--zpg 2 has no effect in one process",
    "train_kd --dataloader_num_workers 4": (
        "--dataloader_num_workers 4 has no effect because rows are prepared before training starts"
    ),
    "view --export r.html --port 80 --open": (
        "--port 80 and --open have no effect with --export, which starts no server"
    ),
    "serve_rm --disable_fast_tokenizer": (
        "--disable_fast_tokenizer has no effect because Transformers has only fast tokenizers"
    ),
    "train_ppo --reward_pretrain ./model --normalize_reward --reward_weights 2 --prm_reduce mean": (
        "--reward_pretrain, --reward_weights 2.0, --normalize_reward and --prm_reduce mean have no effect with "
        "--remote_rm_url"
    ),
    "train_ppo --remote_rm_url= --agent_func_path ./agent.py --normalize_reward": (
        "--normalize_reward has no effect without --reward_pretrain"
    ),
    "train_ppo --agent_func_path ./agent.py": "--remote_rm_url has no effect with --agent_func_path",
    "train_ppo --async_train --partial_rollout": "--partial_rollout has no effect without vLLM (--vllm_num_engines)",
    "train_ppo --enforce_eager --enable_prefix_caching --vllm_gpu_memory_utilization 0.5": (
        "--vllm_gpu_memory_utilization 0.5, --enable_prefix_caching and --enforce_eager have no effect without vLLM "
        "(--vllm_num_engines)"
    ),
    "train_ppo --vllm_num_engines 1 --vllm_engines_per_gpu 1 --max_restarts 2": (
        "--max_restarts 2 has no effect without engines in their own processes (--vllm_engines_per_gpu 2, or "
        "--runtime ray)"
    ),
    "train_ppo --vllm_sync_backend gloo": (
        "--vllm_sync_backend gloo has no effect without vLLM engines on other devices (--runtime ray)"
    ),
    "train_ppo --step_rewards": "--step_rewards has no effect with --remote_rm_url",
    "train_ppo --reward_api_key secret": (
        "--reward_api_key has no effect without reward servers (--remote_rm_url http://...)"
    ),
    "train_ppo --init_kl_coef 0 --kl_target 6 --kl_estimator k1 --ref_pretrain ./model": (
        "--kl_target 6.0, --kl_estimator k1 and --ref_pretrain have no effect with --init_kl_coef 0"
    ),
    "train_ppo_ray --runtime ray --init_kl_coef 0 --ref_num_gpus_per_node 4": (
        "--ref_num_gpus_per_node 4 has no effect with --init_kl_coef 0"
    ),
    "train_ppo --advantage_estimator rloo --n_samples_per_prompt 2 --critic_learning_rate 1e-5": (
        "--critic_learning_rate 1e-05 has no effect without a critic, which only --advantage_estimator gae uses"
    ),
    "train_ppo --remote_rm_url http://127.0.0.1:5000/get_reward --reward_concurrency 4": (
        "--reward_concurrency 4 has no effect without a reward function"
    ),
    "train_ppo --remote_rm_url= --reward_pretrain ./model --reward_processes 4": (
        "--reward_processes 4 has no effect without a .py file with a reward function or an agent"
    ),
    "train_ppo --colocate_all_models": "--colocate_all_models has no effect in one process",
    "train_ppo --use_dynamic_batch --micro_train_batch_size 2": (
        "--micro_train_batch_size 2 has no effect with --use_dynamic_batch, which limits micro-batches by tokens"
    ),
    "train_dpo --muon_nesterov false": "--muon_nesterov false has no effect without --optim muon",
    "train_kto --system_prompt 'a long text'": "--system_prompt has no effect without --apply_chat_template",
    "train_rm --system_key rules": "--system_key has no effect without --apply_chat_template",
    "interactive_chat --apply_chat_template --system_key a": "--system_key has no effect because a chat has no rows",
    "batch_inference --zero_stage 3": "--zero_stage 3 has no effect because each process holds the whole model",
    "batch_inference --tp_size 2": "--tp_size 2 has no effect without --eval_task generate_vllm",
    "interactive_chat --greedy_sampling --top_p 0.5": "--top_p 0.5 has no effect with --greedy_sampling",
}
QUIET = [  # the same flags in runs in which they have an effect
    "train_sft --backend deepspeed --zero_stage 3",
    "train_sft --use_ds_universal_ckpt --zero_stage 2",
    "train_ppo_ray --runtime ray --zero_stage 2",
    "train_ppo_ray --ref_num_gpus_per_node 4 --init_kl_coef 0",  # which selects Ray
    "train_ppo --remote_rm_url= --reward_pretrain ./model --normalize_reward --prm_reduce mean --reward_weights 2",
    "train_ppo --remote_rm_url= --agent_func_path ./agent.py --step_rewards --system_prompt Hi",
    "train_ppo --remote_rm_url= --agent_func_path ./agent.py --reward_pretrain ./model --normalize_reward "
    "--reward_timeout 9 --on_reward_error skip --reward_processes 2",
    "train_ppo --reward_processes 2 --reward_concurrency 8",
    "train_ppo_ray --vllm_num_engines 8 --vllm_sync_backend gloo --enforce_eager",
    "train_ppo_ray --vllm_num_engines 8 --async_train --partial_rollout",
    "train_ppo --vllm_num_engines 1 --vllm_engines_per_gpu 2 --max_restarts 2",
    "train_ppo --remote_rm_url http://127.0.0.1:5000/get_reward --reward_api_key secret",
    "train_ppo --max_len 128 --generate_max_len 64",  # which becomes --max_new_tokens
    "train_ppo --critic_optim muon --muon_ns_steps 4 --critic_muon_lr 0.1",
    "train_dpo --lr_scheduler constant --lr_warmup_ratio 0",
    "train_rm --eval_steps 5",
    "train_sft --apply_chat_template --system_prompt Hi --system_key rules",
    "batch_inference --eval_task rm --value_head_prefix head --post_processor csft --normalize_reward",
    "train_kto --pretrain org/model --use_ms",
]


@pytest.mark.parametrize("asked", SAID)
def test_a_flag_without_effect_is_reported_with_the_reason(asked, workspace):
    assert said(*asked.split(maxsplit=1)) == [SAID[asked]]


@pytest.mark.parametrize("asked", QUIET)
def test_a_flag_with_an_effect_is_not_reported(asked, workspace):
    assert said(*asked.split(maxsplit=1)) == []


def test_sharding_takes_effect_under_a_launcher(workspace, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert said("train_sft", "--zero_stage 3 --zpg 2 --overlap_comm --train_batch_size 16") == []
    assert said("train_sft", "--backend fsdp --zero_stage 3 --zpg 2 --overlap_comm --grad_accum_dtype fp32") == [
        "--zero_stage 3 and --zpg 2 have no effect with --backend fsdp, which shards weights, gradients and optimizer "
        "states over all devices",
        "--overlap_comm has no effect with --backend fsdp, which always overlaps",
        "--grad_accum_dtype fp32 has no effect with --backend fsdp, which sums gradients in fp32",
    ]


def test_without_a_command_line_all_non_default_flags_are_reported(workspace):
    lines = []
    config, _ = parse_given(
        COMMANDS["train_sft"], shlex.split(f"{VALID['train_sft']} --zpg 2 --zero_stage 2"), environ={}
    )
    check(config, lines.append)
    assert lines == ["--zpg 2 has no effect in one process"]


def test_flags_from_files_and_the_environment_count_as_given(workspace):
    (workspace / "run.yaml").write_text("ds: {zero_stage: 2}\n")
    argv = shlex.split(f"{VALID['train_ppo']} --config run.yaml --flash_attn")
    _, given = parse_given(COMMANDS["train_ppo"], argv, environ={"OPENRLHF_ASYNC_QUEUE_SIZE": "2"})
    assert {"zero_stage", "attn_implementation", "async_queue_size", "pretrain"} <= given
    assert "zpg" not in given


def test_weights_have_two_sync_backends(workspace):
    with pytest.raises(ConfigError, match=r"--vllm_sync_backend: expected nccl or gloo, got 'banana'"):
        parse_given(COMMANDS["train_ppo"], ["--vllm_sync_backend", "banana"], environ={})


def test_one_process_has_one_device(workspace):
    with pytest.raises(ConfigError, match=r"one device, but --reward_num_gpus_per_node 2 needs more"):
        said("train_ppo", "--reward_num_gpus_per_node 2")
