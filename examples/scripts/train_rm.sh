#!/usr/bin/env bash
# Reward model from pairs of conversations, the chosen and the rejected one.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

launch train_rm \
    --pretrain "${MODEL:-OpenRLHF/Llama-3-8b-sft-mixture}" \
    --dataset "${DATASET:-OpenRLHF/preference_dataset_mixture2_and_safe_pku}" \
    --apply_chat_template \
    --chosen_key chosen \
    --rejected_key rejected \
    --max_len "${MAX_LEN:-8192}" \
    --train_batch_size "${TRAIN_BATCH:-256}" \
    --micro_train_batch_size "${MICRO_BATCH:-1}" \
    --max_epochs 1 \
    --learning_rate 9e-6 \
    --zero_stage 3 \
    --param_dtype bf16 \
    --packing_samples \
    --gradient_checkpointing \
    --save_path "${SAVE_PATH:-./checkpoint/llama3-8b-rm}" \
    --save_steps -1 \
    --logging_steps 1 \
    --eval_steps -1 \
    "$@"
