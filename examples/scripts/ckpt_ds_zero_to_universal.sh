#!/usr/bin/env bash
# Converts the DeepSpeed checkpoints under a folder to universal ones, which any number of devices can resume from:
#   ckpt_ds_zero_to_universal.sh { ckpt_path }
# Then run the same training command with --load_checkpoint --use_ds_universal_ckpt. Existing conversions are kept.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ckpt_path=${1:-${CKPT_PATH:?the folder that --ckpt_path named}}
find "$ckpt_path" -type d -name deepspeed -print0 | while IFS= read -r -d '' saved; do
    universal=$(dirname "$saved")/universal
    [ -d "$universal" ] || python3 -m deepspeed.checkpoint.ds_to_universal \
        --input_folder "$saved" --output_folder "$universal" "${@:2}"
done
