#!/usr/bin/env bash
# Makes the DeepSpeed checkpoints under a folder universal, so that any number of devices can go on with them:
#   ckpt_ds_zero_to_universal.sh { ckpt_path }
# Then the same training command with --load_checkpoint --use_ds_universal_ckpt. What is there already is kept.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

ckpt_path=${1:-${CKPT_PATH:?the folder that --ckpt_path named}}
find "$ckpt_path" -type d -name deepspeed -print0 | while IFS= read -r -d '' saved; do
    universal=$(dirname "$saved")/universal
    [ -d "$universal" ] || python3 -m deepspeed.checkpoint.ds_to_universal \
        --input_folder "$saved" --output_folder "$universal" "${@:2}"
done
