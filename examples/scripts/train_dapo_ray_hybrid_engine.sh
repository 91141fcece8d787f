#!/usr/bin/env bash
# DAPO (https://arxiv.org/abs/2503.14476): groups that are all right or all wrong are replaced by other prompts, the clip
# range is wider above than below, long answers lose reward over their last OVERLONG tokens, and there is no KL.
set -euo pipefail

export MODEL=${MODEL:-Qwen/Qwen2.5-7B}
export PROMPTS=${PROMPTS:-zhuzilin/dapo-math-17k} INPUT_KEY=${INPUT_KEY:-prompt} LABEL_KEY=${LABEL_KEY:-label}
export ANSWER_LEN=${ANSWER_LEN:-8192} SAMPLES=${SAMPLES:-16} TRAIN_BATCH=${TRAIN_BATCH:-512}
export SAVE_PATH=${SAVE_PATH:-$PWD/checkpoint/qwen-7b-dapo} CKPT_PATH=${CKPT_PATH:-$PWD/checkpoint/qwen-7b-dapo-ckpt}

exec "$(dirname "${BASH_SOURCE[0]}")/train_ppo_with_reward_fn.sh" \
    --advantage_estimator group_norm --init_kl_coef 0 --dynamic_filtering --dynamic_filtering_reward_range 0 1 \
    --eps_clip_low_high 0.2 0.28 --overlong_buffer_len "${OVERLONG:-2048}" --overlong_penalty_factor 1 \
    "$@"
