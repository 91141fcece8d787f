"""Every command line in the READMEs of five upstream versions, without its launcher, gives the expected config."""

import shlex

import pytest

from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flag_values
from openrlhf.config.parser import parse
from openrlhf.config.runtime import num_devices, resolve_runtime
from openrlhf.errors import ConfigError

# 000 and 003 print the same SFT and RM commands; 001 resumes; 004 names the dtype.
SFT = """
    --max_len 4096 --dataset Open-Orca/OpenOrca --input_key question --output_key response
    --input_template 'User: {}\nAssistant: ' --train_batch_size 256 --micro_train_batch_size 2 --max_samples 500000
    --pretrain meta-llama/Meta-Llama-3-8B --save_path ./checkpoint/llama3-8b-sft --save_steps -1 --logging_steps 1
    --eval_steps -1 --zero_stage 2 --max_epochs 1 --packing_samples --learning_rate 5e-6 --gradient_checkpointing
    --use_wandb {wandb_token}
"""
RM = """
    --save_path ./checkpoint/llama3-8b-rm --save_steps -1 --logging_steps 1 --eval_steps -1 --train_batch_size 256
    --micro_train_batch_size 1 --pretrain OpenRLHF/Llama-3-8b-sft-mixture --max_epochs 1 --max_len 8192 --zero_stage 3
    --learning_rate 9e-6 --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku --apply_chat_template
    --chosen_key chosen --rejected_key rejected --packing_samples --gradient_checkpointing --use_wandb {wandb_token}
"""
BF16_AND_FLASH = " --bf16 --flash_attn"
BF16 = " --param_dtype bf16"

PPO = """
    --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models --vllm_gpu_memory_utilization 0.5
    --pretrain OpenRLHF/Llama-3-8b-sft-mixture --reward_pretrain OpenRLHF/Llama-3-8b-rm-700k
    --save_path /openrlhf/examples/test_scripts/final/llama3-8b-rlhf
    --ckpt_path /openrlhf/examples/test_scripts/ckpt/llama3-8b-rlhf --save_hf_ckpt --train_batch_size 128
    --rollout_batch_size 1024 --n_samples_per_prompt 1 --max_epochs 1 --prompt_max_len 1024 --max_samples 100000
    --generate_max_len 1024 --zero_stage 3 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01
    --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --apply_chat_template --normalize_reward
    --gradient_checkpointing --packing_samples --vllm_sync_backend nccl --enforce_eager --vllm_enable_sleep
    --deepspeed_enable_sleep --use_wandb {wandb_token}
"""
MICRO_BATCHES = " --micro_train_batch_size 8 --micro_rollout_batch_size 16"
TWO_EACH = """
    --ref_num_nodes 1 --ref_num_gpus_per_node 2 --reward_num_nodes 1 --reward_num_gpus_per_node 2
    --critic_num_nodes 1 --critic_num_gpus_per_node 2 --actor_num_nodes 1 --actor_num_gpus_per_node 2
"""
EIGHT_EACH = TWO_EACH.replace("gpus_per_node 2", "gpus_per_node 8")
PPO_000 = PPO + TWO_EACH + MICRO_BATCHES + " --bf16"
PPO_001 = PPO + MICRO_BATCHES + " --bf16"
PPO_003 = PPO + EIGHT_EACH + MICRO_BATCHES + " --bf16"
PPO_004 = PPO + EIGHT_EACH + " --use_dynamic_batch --param_dtype bf16"

LORA = """
    --model_path meta-llama/Meta-Llama-3-8B --lora_path ./checkpoint/llama3-8b-rm
    --output_path ./checkpoint/llama-3-8b-rm-combined --is_rm
"""

# Dotted commands as 0.10.2 and later print them.
DOTTED_GRPO = """
    --ref.num_nodes 1 --ref.num_gpus_per_node 8 --actor.num_nodes 1 --actor.num_gpus_per_node 8 --vllm.num_engines 4
    --vllm.tensor_parallel_size 2 --train.colocate_all --vllm.gpu_memory_utilization 0.6 --algo.kl.init_coef 1e-3
    --algo.advantage.gamma 1.0 --algo.kl.use_loss --algo.kl.estimator k3 --algo.advantage.estimator group_norm
    --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1 --actor.eps_clip_low_high 0.2 0.27
    --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture --reward.remote_url ./reward.py
    --ckpt.output_dir ./final --ckpt.path ./ckpt --ckpt.save_steps 20 --ckpt.save_hf --train.micro_batch_size 8
    --train.batch_size 128 --rollout.micro_batch_size 16 --rollout.batch_size 128 --rollout.n_samples_per_prompt 8
    --train.max_epochs 1 --data.max_len 2048 --data.max_samples 20000 --ds.zero_stage 3 --ds.param_dtype bf16
    --actor.adam.lr 5e-7 --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 --data.input_key context_messages
    --data.apply_chat_template --actor.gradient_checkpointing_enable --ds.packing_samples --vllm.sync_backend nccl
    --vllm.enforce_eager --vllm.enable_sleep --ds.enable_sleep --algo.advantage.is_correction_enable
"""
DOTTED_SFT = """
    --data.max_len 2048 --data.dataset Open-Orca/OpenOrca --data.input_key question --data.output_key response
    --train.batch_size 256 --train.micro_batch_size 2 --data.max_samples 500000
    --model.model_name_or_path meta-llama/Meta-Llama-3-8B --ckpt.output_dir ./checkpoint/llama3-8b-sft
    --ckpt.save_steps -1 --logger.logging_steps 1 --eval.steps -1 --ds.zero_stage 2 --train.max_epochs 1
    --ds.param_dtype bf16 --ds.attn_implementation flash_attention_2 --optim adam --adam.lr 5e-6 --ckpt.load_enable
    --ds.packing_samples --model.gradient_checkpointing_enable --logger.wandb.key {wandb_token}
    --logger.wandb.project sft
"""
DOTTED_DPO = """
    --model.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture --model.beta 0.2 --model.gradient_checkpointing_enable
    --data.dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku --data.apply_chat_template
    --data.chosen_key chosen --data.rejected_key rejected --data.max_len 8192 --train.batch_size 256
    --train.micro_batch_size 1 --train.max_epochs 1 --train.seed 48 --adam.lr 5e-7 --ds.packing_samples
    --ds.zero_stage 3 --ds.adam_offload --ds.param_dtype bf16 --ref.offload --ckpt.output_dir ./model
"""

SFT_VALUES = {
    "max_len": 4096,
    "dataset": "Open-Orca/OpenOrca",
    "input_key": "question",
    "output_key": "response",
    "input_template": "User: {}\nAssistant: ",
    "train_batch_size": 256,
    "micro_train_batch_size": 2,
    "max_samples": 500_000,
    "pretrain": "meta-llama/Meta-Llama-3-8B",
    "save_path": "./checkpoint/llama3-8b-sft",
    "save_steps": -1,
    "zero_stage": 2,
    "max_epochs": 1,
    "packing_samples": True,
    "param_dtype": "bf16",
    "learning_rate": 5e-6,
    "gradient_checkpointing": True,
    "use_wandb": "{wandb_token}",
}
RM_VALUES = {
    "max_len": 8192,
    "zero_stage": 3,
    "learning_rate": 9e-6,
    "apply_chat_template": True,
    "chosen_key": "chosen",
    "rejected_key": "rejected",
    "packing_samples": True,
    "param_dtype": "bf16",
    "value_head_prefix": "score",
}
PPO_VALUES = {
    "vllm_num_engines": 4,
    "vllm_tensor_parallel_size": 2,
    "vllm_gpu_memory_utilization": 0.5,
    "colocate_all_models": True,
    "reward_pretrain": "OpenRLHF/Llama-3-8b-rm-700k",
    "prompt_data": "OpenRLHF/prompt-collection-v0.1",
    "rollout_batch_size": 1024,
    "train_batch_size": 128,
    "n_samples_per_prompt": 1,
    "max_epochs": 1,
    "prompt_max_len": 1024,
    "generate_max_len": 1024,
    "zero_stage": 3,
    "param_dtype": "bf16",
    "actor_learning_rate": 5e-7,
    "critic_learning_rate": 9e-6,
    "init_kl_coef": 0.01,
    "normalize_reward": True,
    "enforce_eager": True,
    "vllm_enable_sleep": True,
    "deepspeed_enable_sleep": True,
    "advantage_estimator": "gae",
}
MICRO_BATCH_VALUES = {"micro_train_batch_size": 8, "micro_rollout_batch_size": 16}
FLASH = {"attn_implementation": "flash_attention_2"}
LORA_VALUES = {
    "model_path": "meta-llama/Meta-Llama-3-8B",
    "lora_path": "./checkpoint/llama3-8b-rm",
    "output_path": "./checkpoint/llama-3-8b-rm-combined",
    "is_rm": True,
    "param_dtype": "bf16",
}

PRINTED = {  # version and name -> (command, printed flags, expected values)
    "000 and 003 sft": ("train_sft", SFT + BF16_AND_FLASH, SFT_VALUES | FLASH),
    "001 sft": (
        "train_sft",
        SFT + BF16_AND_FLASH + " --load_checkpoint",
        SFT_VALUES | FLASH | {"load_checkpoint": True},
    ),
    "004 sft": ("train_sft", SFT + BF16, SFT_VALUES | {"attn_implementation": "auto"}),
    "000 sft with a chat template": (
        "train_sft",
        SFT + BF16_AND_FLASH + " --apply_chat_template --tokenizer_chat_template '{HF Chat Template}'",
        {"apply_chat_template": True, "tokenizer_chat_template": "{HF Chat Template}"},
    ),
    "000 sft with ring attention": (
        "train_sft",
        SFT + BF16_AND_FLASH + " --ring_attn_size 2 --ring_head_stride 2",
        {"ring_attn_size": 2, "ring_head_stride": 2},
    ),
    "004 sft on turns": ("train_sft", SFT + BF16 + " --apply_chat_template --multiturn", {"multiturn": True}),
    "000 continued pre-training": ("train_sft", SFT + BF16_AND_FLASH + " --pretrain_mode", {"pretrain_mode": True}),
    "000 and 003 rm": ("train_rm", RM + BF16_AND_FLASH, RM_VALUES | FLASH),
    "001 rm": ("train_rm", RM + BF16_AND_FLASH + " --load_checkpoint", RM_VALUES | FLASH | {"load_checkpoint": True}),
    "004 rm": ("train_rm", RM + BF16, RM_VALUES),
    "000 ppo": ("train_ppo_ray", PPO_000, PPO_VALUES | MICRO_BATCH_VALUES | {"actor_num_gpus_per_node": 2}),
    "001 ppo": ("train_ppo_ray", PPO_001, PPO_VALUES | MICRO_BATCH_VALUES | {"actor_num_gpus_per_node": None}),
    "003 ppo": ("train_ppo_ray", PPO_003, PPO_VALUES | MICRO_BATCH_VALUES | {"actor_num_gpus_per_node": 8}),
    "004 ppo": ("train_ppo_ray", PPO_004, PPO_VALUES | {"use_dynamic_batch": True, "micro_train_batch_size": 4}),
    **{
        f"004 {estimator}": (
            "train_ppo_ray",
            f"{PPO_004} --advantage_estimator {estimator} --n_samples_per_prompt 4",
            {"advantage_estimator": estimator, "n_samples_per_prompt": 4},
        )
        for estimator in ("reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo")
    },
    "004 ppo without a reference": ("train_ppo_ray", PPO_004 + " --init_kl_coef 0", {"init_kl_coef": 0.0}),
    "004 ppo with a reward server": (
        "train_ppo_ray",
        PPO_004 + " --remote_rm_url http://host:5000/get_reward",
        {"remote_rm_url": "http://host:5000/get_reward"},
    ),
    "004 ppo with correction": (
        "train_ppo_ray",
        PPO_004 + " --enable_vllm_is_correction --vllm_is_truncated_threshold 0.5 5.0 --use_icepop",
        {
            "enable_vllm_is_correction": True,
            "vllm_is_truncated_threshold": (0.5, 5.0),
            "vllm_is_correction_type": "icepop",
        },
    ),
    "001 rft": (
        "train_ppo_ray",
        "--remote_rm_url /path/to/reward_func.py --label_key answer",
        {"remote_rm_url": "/path/to/reward_func.py", "label_key": "answer"},
    ),
    "004 rft": (
        "train_ppo_ray",
        "--pretrain meta-llama/Meta-Llama-3-8B --use_dynamic_batch --remote_rm_url /path/to/reward_func.py "
        "--label_key answer --prompt_data your_prompt_dataset",
        {"use_dynamic_batch": True, "label_key": "answer", "prompt_data": "your_prompt_dataset"},
    ),
    "001 and 004 agent": (
        "train_ppo_ray",
        "--use_dynamic_batch --agent_func_path /path/to/agent_func.py --async_train",
        {"agent_func_path": "/path/to/agent_func.py", "async_train": True, "async_queue_size": 1},
    ),
    "001 lora_combiner": ("lora_combiner", LORA + " --bf16", LORA_VALUES),
    "004 lora_combiner": ("lora_combiner", LORA + BF16, LORA_VALUES),
    "002 features": (
        "train_sft",
        "--wandb {wandb_token} --flash_attn --load_in_4bit --lora_rank 8 --target_modules q_proj v_proj "
        "--aux_loss_coef 0.01",
        {"use_wandb": "{wandb_token}", "load_in_4bit": True, "lora_rank": 8, "aux_loss_coef": 0.01}
        | {"target_modules": ("q_proj", "v_proj")}
        | FLASH,
    ),
    "dotted grpo": (
        "train_ppo_ray",
        DOTTED_GRPO,
        {
            "pretrain": "OpenRLHF/Llama-3-8b-sft-mixture",
            "remote_rm_url": "./reward.py",
            "prompt_data": "OpenRLHF/prompt-collection-v0.1",
            "actor_num_gpus_per_node": 8,
            "vllm_num_engines": 4,
            "colocate_all_models": True,
            "init_kl_coef": 1e-3,
            "use_kl_loss": True,
            "kl_estimator": "k3",
            "advantage_estimator": "group_norm",
            "dynamic_filtering": True,
            "dynamic_filtering_reward_range": (0.0, 1.0),
            "eps_clip_low_high": (0.2, 0.27),
            "save_path": "./final",
            "ckpt_path": "./ckpt",
            "save_steps": 20,
            "save_hf_ckpt": True,
            "train_batch_size": 128,
            "micro_rollout_batch_size": 16,
            "n_samples_per_prompt": 8,
            "max_len": 2048,
            "actor_learning_rate": 5e-7,
            "gradient_checkpointing": True,
            "packing_samples": True,
            "deepspeed_enable_sleep": True,
            "enable_vllm_is_correction": True,
        },
    ),
    "dotted sft": (
        "train_sft",
        DOTTED_SFT,
        {
            "pretrain": "meta-llama/Meta-Llama-3-8B",
            "dataset": "Open-Orca/OpenOrca",
            "max_len": 2048,
            "learning_rate": 5e-6,
            "optim": "adam",
            "load_checkpoint": True,
            "gradient_checkpointing": True,
            "use_wandb": "{wandb_token}",
            "wandb_project": "sft",
        }
        | FLASH,
    ),
    "dotted dpo": (
        "train_dpo",
        DOTTED_DPO,
        {"beta": 0.2, "ref_offload": True, "adam_offload": True, "seed": 48, "max_len": 8192, "learning_rate": 5e-7},
    ),
}


def read(command, printed):
    return parse(COMMANDS[command], shlex.split(printed), environ={})


@pytest.mark.parametrize("place", PRINTED)
def test_a_printed_command_gives_the_expected_config(place):
    command, printed, expected = PRINTED[place]
    values = flag_values(read(command, printed))
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize("place", ["000 and 003 sft", "001 sft", "004 sft", "000 and 003 rm", "001 rm", "004 rm"])
def test_the_supervised_commands_pass_every_rule(place, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")  # printed behind the deepspeed launcher
    lines = []
    command, printed, _ = PRINTED[place]
    config = read(command, printed)
    assert check(config, lines.append) == config
    assert lines == []


@pytest.mark.parametrize("printed", [PPO_001, PPO_003, PPO_004], ids=["001", "003", "004"])
def test_the_ppo_commands_pass_every_rule_with_eight_devices_each(printed):
    config = check(read("train_ppo_ray", printed))
    assert resolve_runtime(config) == "ray"
    assert {num_devices(config, role) for role in ("actor", "ref", "critic", "reward")} == {8}


def test_the_ppo_command_of_000_shares_two_devices_with_eight_of_the_engines():
    with pytest.raises(ConfigError) as caught:
        check(read("train_ppo_ray", PPO_000))
    assert str(caught.value) == (
        "--colocate_all_models shares the policy's 2 devices with the engines, but --vllm_num_engines 4 x "
        "--vllm_tensor_parallel_size 2 is 8. Try: --actor_num_gpus_per_node 8"
    )


def test_the_dotted_commands_pass_every_rule(workspace):
    for place in ("dotted grpo", "dotted sft", "dotted dpo"):
        command, printed, _ = PRINTED[place]
        assert check(read(command, printed)) == read(command, printed)


def test_an_agent_runs_without_a_reward_model(workspace):
    printed = (
        "--pretrain ./model --prompt_data ./data.jsonl --use_dynamic_batch --agent_func_path ./agent.py --async_train"
    )
    config = check(read("train_ppo_ray", printed))
    assert config.batches.packing_samples  # dynamic batches turn it on
