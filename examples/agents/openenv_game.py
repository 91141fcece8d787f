"""An environment of OpenEnv as an agent; `openenv_server.py` serves one.

The label of a row is the seed of a game, and all samples of a row play the same one:

    python examples/agents/openenv_server.py --port 8000 &
    python -c 'import json
    for seed in range(512): print(json.dumps({"input": "Answer with a number only.", "seed": seed}))' > games.jsonl
    OPENENV_URL=http://127.0.0.1:8000 python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-0.5B-Instruct \\
        --prompt_data games.jsonl --label_key seed --advantage_estimator group_norm --n_samples_per_prompt 8 \\
        --max_len 1024 --max_new_tokens 32 --agent_func_path examples/agents/openenv_game.py

The chat template is applied to the game's messages, so --apply_chat_template is left out. On a
cluster, set OPENENV_URL on every node, before `ray start`: agents on other nodes do not get the command's variables.
"""

import os

from openrlhf.utils.agent import OpenEnvAgentExecutor


class AgentExecutor(OpenEnvAgentExecutor):
    """Any environment whose action is text."""

    def __init__(self) -> None:
        super().__init__(os.environ.get("OPENENV_URL", "http://127.0.0.1:8000"))
