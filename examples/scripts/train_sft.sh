#!/usr/bin/env bash
# Supervised fine-tuning on questions and answers, with packed samples.
# Conversations: append --apply_chat_template (and --multiturn to learn every turn of the assistant).
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

launch train_sft \
    --pretrain "${MODEL:-meta-llama/Meta-Llama-3-8B}" \
    --dataset "${DATASET:-Open-Orca/OpenOrca}" \
    --input_key "${INPUT_KEY:-question}" \
    --output_key "${OUTPUT_KEY:-response}" \
    --input_template $'User: {}\nAssistant: ' \
    --max_samples "${MAX_SAMPLES:-500000}" \
    --max_len "${MAX_LEN:-4096}" \
    --train_batch_size "${TRAIN_BATCH:-256}" \
    --micro_train_batch_size "${MICRO_BATCH:-2}" \
    --max_epochs 1 \
    --learning_rate 5e-6 \
    --zero_stage 2 \
    --param_dtype bf16 \
    --packing_samples \
    --gradient_checkpointing \
    --save_path "${SAVE_PATH:-./checkpoint/llama3-8b-sft}" \
    --save_steps -1 \
    --logging_steps 1 \
    --eval_steps -1 \
    "$@"
