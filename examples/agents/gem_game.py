"""A GEM game (pip install gem-llm): here, guess a number from 1 to 10 in four turns.

A row names the environment and the seed of the game, and all samples of a row play the same one:

    python -c 'import json
    for seed in range(512): print(json.dumps({"game": "game:GuessTheNumber-v0-easy", "seed": seed}))' > games.jsonl
    python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-0.5B-Instruct --prompt_data games.jsonl \\
        --input_key game --label_key seed --advantage_estimator group_norm --n_samples_per_prompt 8 \\
        --max_len 2048 --max_new_tokens 128 --agent_func_path examples/agents/gem_game.py

The chat template is applied to the game's messages, so --apply_chat_template is left out.
"""

from openrlhf.utils.agent import GemAgentExecutor


class AgentExecutor(GemAgentExecutor):
    """Any text environment of GEM; the prompt names it."""
