#!/usr/bin/env bash
# Prolonged RL on mathematics as in ProRL v2: REINFORCE++-baseline with a small KL loss, a wider clip range above, dynamic
# filtering, a correction for the difference between engine and trainer, and no reward for truncated answers.
# The reward needs: pip install 'math-verify[antlr4_13_2]'
set -euo pipefail

export MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B}
export REWARD_FUNC=${REWARD_FUNC:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../rewards" && pwd)/math_verification.py}
export PROMPTS=${PROMPTS:-zhuzilin/dapo-math-17k} INPUT_KEY=${INPUT_KEY:-prompt} LABEL_KEY=${LABEL_KEY:-label}
export ENGINES=${ENGINES:-8} ENGINE_TP=${ENGINE_TP:-1}
export ANSWER_LEN=${ANSWER_LEN:-8192} SAMPLES=${SAMPLES:-16} TRAIN_BATCH=${TRAIN_BATCH:-512}
export SAVE_PATH=${SAVE_PATH:-$PWD/checkpoint/qwen-1.5b-prorlv2} CKPT_PATH=${CKPT_PATH:-$PWD/checkpoint/qwen-1.5b-prorlv2-ckpt}

exec "$(dirname "${BASH_SOURCE[0]}")/train_ppo_with_reward_fn.sh" \
    --advantage_estimator reinforce_baseline --init_kl_coef 1e-4 --use_kl_loss --kl_estimator k2 \
    --dynamic_filtering --dynamic_filtering_reward_range 0 1 --eps_clip_low_high 0.2 0.27 \
    --enable_vllm_is_correction --vllm_is_correction_type icepop --stop_properly_penalty_coef 0 \
    "$@"
