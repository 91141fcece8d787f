#!/usr/bin/env bash
# Serves a reward model to other runs, which pass --remote_rm_url http://THIS_HOST:PORT/get_reward.
# To serve other machines, pass --host 0.0.0.0, which requires a key: export OPENRLHF_RM_API_KEY=... on both sides.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python3 -m openrlhf.cli.serve_rm \
    --reward_pretrain "${REWARD_MODEL:-OpenRLHF/Llama-3-8b-rm-700k}" \
    --port "${PORT:-5000}" \
    --max_len "${MAX_LEN:-8192}" \
    --normalize_reward \
    --param_dtype bf16 \
    --packing_samples \
    "$@"
