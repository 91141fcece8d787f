#!/usr/bin/env bash
# REINFORCE++-baseline with a multi-turn agent: AGENT is a file with class AgentExecutor. The engines have their own
# devices and keep generating while the policy trains (--async_train); importance correction accounts for their older
# weights. For a synchronous run on one set of devices, use train_reinforce_baseline_hybrid_engine.sh with an agent.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train_ppo_ray \
    --actor_num_nodes "${ACTOR_NODES:-1}" \
    --actor_num_gpus_per_node "${ACTOR_GPUS:-4}" \
    --ref_num_nodes "${ACTOR_NODES:-1}" \
    --ref_num_gpus_per_node "${ACTOR_GPUS:-4}" \
    --colocate_actor_ref \
    --vllm_num_engines "${ENGINES:-4}" \
    --vllm_tensor_parallel_size "${ENGINE_TP:-1}" \
    --vllm_sync_backend nccl \
    --enforce_eager \
    --async_train \
    --async_queue_size 1 \
    --enable_vllm_is_correction \
    --agent_func_path "${AGENT:-$examples/agents/calculator.py}" \
    --system_prompt "${SYSTEM_PROMPT:-Write <calc>an expression</calc> to have it computed, <answer>a number</answer> to end.}" \
    --stop "</calc>" "</answer>" \
    --max_turns "${TURNS:-6}" \
    --pretrain "${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}" \
    --prompt_data "${PROMPTS:-openai/gsm8k@main}" \
    --input_key "${INPUT_KEY:-question}" \
    --label_key "${LABEL_KEY:-answer}" \
    --apply_chat_template \
    --max_samples "${MAX_SAMPLES:-100000}" \
    --prompt_max_len "${PROMPT_LEN:-1024}" \
    --generate_max_len "${ANSWER_LEN:-1024}" \
    --advantage_estimator reinforce_baseline \
    --rollout_batch_size "${ROLLOUT_BATCH:-128}" \
    --train_batch_size "${TRAIN_BATCH:-1024}" \
    --use_dynamic_batch \
    --n_samples_per_prompt "${SAMPLES:-8}" \
    --max_epochs 1 \
    --actor_learning_rate 5e-7 \
    --init_kl_coef 1e-3 \
    --use_kl_loss \
    --kl_estimator k2 \
    --zero_stage 3 \
    --param_dtype bf16 \
    --packing_samples \
    --gradient_checkpointing \
    --save_path "${SAVE_PATH:-$PWD/checkpoint/llama3-8b-agent}" \
    --ckpt_path "${CKPT_PATH:-$PWD/checkpoint/llama3-8b-agent-ckpt}" \
    --save_hf_ckpt \
    "$@"
