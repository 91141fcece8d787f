#!/usr/bin/env bash
# Iterative DPO, ITERATIONS times: the policy answers SAMPLES times, the reward model ranks, DPO trains on best against
# worst. A stopped run resumes where it left off. ENGINE=generate generates with Transformers instead of vLLM.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python3 "$examples/pipelines/iterative_dpo.py" \
    --policy "${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}" \
    --reward "${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}" \
    --prompts "${PROMPTS:-OpenRLHF/prompt-collection-v0.1}" \
    --folder "${SAVE_PATH:-./checkpoint/llama3-8b-iter-dpo}" \
    --iterations "${ITERATIONS:-5}" \
    --prompts_per_iteration "${PROMPTS_PER_ITERATION:-10240}" \
    --samples "${SAMPLES:-8}" \
    --engine "${ENGINE:-generate_vllm}" \
    --launcher "${LAUNCHER:-deepspeed --module}" \
    --generate "--input_key ${INPUT_KEY:-context_messages} --apply_chat_template --prompt_max_len ${PROMPT_LEN:-1024} \
        --max_new_tokens ${ANSWER_LEN:-1024}" \
    --score "--max_len ${MAX_LEN:-2048} --param_dtype bf16" \
    --train "--max_len ${MAX_LEN:-2048} --train_batch_size ${TRAIN_BATCH:-128} \
        --micro_train_batch_size ${MICRO_BATCH:-1} --max_epochs 1 --learning_rate 5e-7 --beta 0.1 --zero_stage 3 \
        --param_dtype bf16 --packing_samples --gradient_checkpointing ${TRAIN_FLAGS:-}" \
    "$@"
