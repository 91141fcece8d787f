#!/usr/bin/env bash
# A process reward model, then best of n: the model learns from labelled steps, the policy answers every prompt SAMPLES
# times, and the answer whose weakest step scores highest is kept in SAVE_PATH/best.jsonl. REWARD_FUNC measures the true
# quality of these. Each line of an answer is a step. A stopped run resumes where it left off. ENGINE=generate generates
# with Transformers instead of vLLM.
# shellcheck source=examples/scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

placeholder=${PLACEHOLDER:-ки}
template=${TEMPLATE:-$'{}\n'}
quoted="'${template//\'/\'\\\'\'}'" # as one word among flags

python3 "$examples/pipelines/prm_best_of_n.py" \
    --policy "${MODEL:-peiyi9979/mistral-7b-sft}" \
    --base "${BASE:-mistralai/Mistral-7B-v0.1}" \
    --labels "${DATASET:-zhuzilin/Math-Shepherd}" \
    --prompts "${PROMPTS:-openai/gsm8k@main}" \
    --folder "${SAVE_PATH:-./checkpoint/mistral-7b-best-of-n}" \
    --samples "${SAMPLES:-8}" \
    --mark_steps $'\n' " $placeholder"$'\n' \
    --check "${REWARD_FUNC:-$scripts/reward_func.py}" \
    --label_key "${ANSWER_KEY:-answer}" \
    --engine "${ENGINE:-generate_vllm}" \
    --launcher "${LAUNCHER:-deepspeed --module}" \
    --generate "--input_key ${PROMPT_KEY:-question} --input_template $quoted --dataset_split ${SPLIT:-test} \
        --prompt_max_len ${PROMPT_LEN:-1024} --max_new_tokens ${ANSWER_LEN:-1024} --max_samples ${MAX_SAMPLES:-50000}" \
    --score "--max_len ${MAX_LEN:-2048} --param_dtype bf16" \
    --train "--input_key ${INPUT_KEY:-input} --label_key ${LABEL_KEY:-value} --placeholder_token $placeholder \
        --reward_tokens + - --max_len ${MAX_LEN:-2048} --train_batch_size ${TRAIN_BATCH:-256} \
        --micro_train_batch_size ${MICRO_BATCH:-8} --max_epochs 1 --learning_rate 1e-6 --zero_stage 3 \
        --param_dtype bf16 --packing_samples --gradient_checkpointing ${TRAIN_FLAGS:-}" \
    "$@"
