#!/usr/bin/env bash
# Conditional SFT (https://arxiv.org/abs/2308.12050): the reward model scores SAMPLES answers of the policy to each prompt,
# and the policy learns every answer, prefixed by its normalised reward, so that you can request a high one later:
# interactive_chat_llama.sh MODEL --enable_csft --csft_prompt '<rm_score>: 2.00'.
# ANSWERS=DATA learns existing answers; its fields are input and output.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python3 "$examples/pipelines/conditional_sft.py" \
    --policy "${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}" \
    --reward "${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}" \
    --prompts "${PROMPTS:-OpenRLHF/prompt-collection-v0.1}" \
    ${ANSWERS:+--answers "$ANSWERS"} \
    --folder "${SAVE_PATH:-./checkpoint/llama3-8b-csft}" \
    --samples "${SAMPLES:-4}" \
    --engine "${ENGINE:-generate_vllm}" \
    --launcher "${LAUNCHER:-deepspeed --module}" \
    --generate "--input_key ${INPUT_KEY:-context_messages} --apply_chat_template --prompt_max_len ${PROMPT_LEN:-1024} \
        --max_new_tokens ${ANSWER_LEN:-1024} --max_samples ${MAX_SAMPLES:-50000}" \
    --score "--max_len ${MAX_LEN:-2048} --param_dtype bf16" \
    --train "--max_len ${MAX_LEN:-2048} --train_batch_size ${TRAIN_BATCH:-128} \
        --micro_train_batch_size ${MICRO_BATCH:-2} --max_epochs 1 --learning_rate 5e-6 --zero_stage 3 \
        --param_dtype bf16 --packing_samples --gradient_checkpointing ${TRAIN_FLAGS:-}" \
    "$@"
