"""Plays NeMo Gym rows against one of its resources servers, already running at NEMO_GYM_URL.

The label of a prompt is its NeMo Gym row as JSON text; the prompt can be any unique text:

    python -c 'import json, sys
    for number, line in enumerate(sys.stdin): print(json.dumps({"input": str(number), "label": line}))' \\
        < gym_rows.jsonl > prompts.jsonl
    NEMO_GYM_URL=http://127.0.0.1:8000 python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-1.5B-Instruct \\
        --prompt_data prompts.jsonl --input_key input --label_key label --advantage_estimator group_norm \\
        --n_samples_per_prompt 8 --max_len 4096 --max_new_tokens 512 --max_turns 6 \\
        --agent_func_path examples/python/agent_func_nemogym_executor.py

The chat template is applied to the messages of the row, so --apply_chat_template is left out. docs/agents.md lists the
supported parts of NeMo Gym.
"""

import os

from openrlhf.utils.agent import NemoGymAgentExecutor


class AgentExecutor(NemoGymAgentExecutor):
    def __init__(self):
        super().__init__(os.environ.get("NEMO_GYM_URL", "http://127.0.0.1:8000"))
