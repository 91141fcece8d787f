#!/usr/bin/env bash
# SFT of a LoRA adapter on a mixture of experts, with the loss that balances the experts.
# lora_combiner merges the adapter into the base. QLoRA: append --zero_stage 2 --load_in_4bit.
set -euo pipefail

export MODEL=${MODEL:-mistralai/Mixtral-8x7B-v0.1}
export SAVE_PATH=${SAVE_PATH:-./checkpoint/mixtral-sft-lora}

exec "$(dirname "${BASH_SOURCE[0]}")/train_sft.sh" \
    --zero_stage 3 --lora_rank 64 --lora_alpha 64 --learning_rate 1e-4 --aux_loss_coef 0.001 \
    "$@"
