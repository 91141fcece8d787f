#!/usr/bin/env bash
# A conversation in the terminal: interactive_chat_llama.sh { pretrain_model_path }
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

model=${1:-${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}}
python3 -m openrlhf.cli.interactive_chat --pretrain "$model" --apply_chat_template --max_len "${MAX_LEN:-4096}" "${@:2}"
