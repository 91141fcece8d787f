"""A multi-turn game: the policy guesses a number from 1 to 100 and is told whether to go higher or lower.

The label is the number. A hit is worth 1 on the first guess and 0.5 on the last allowed one; without a hit, the closest
guess earns up to 0.25. A prompt could be: "I am thinking of a number from 1 to 100. Guess it."

    python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-0.5B-Instruct --prompt_data numbers.jsonl \\
        --input_key prompt --label_key number --apply_chat_template --advantage_estimator reinforce_baseline \\
        --n_samples_per_prompt 8 --max_new_tokens 64 --agent_func_path examples/agents/guessing_game.py
"""

import re

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

GUESSES = 7  # enough if each guess halves the interval
TURN = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # as the model's chat template writes it


class GuessingGame(AgentInstanceBase):
    """One number, up to GUESSES guesses."""

    def __init__(self, *args, **kwargs):
        self.guesses = 0
        self.nearest = 100

    async def step(self, states, **kwargs):
        self.guesses += 1
        number, guess = int(states["label"]), last_number(states["action_text"])
        if guess is not None:
            self.nearest = min(self.nearest, abs(guess - number))
        hit, last = guess == number, self.guesses == GUESSES
        return {
            "rewards": self.reward(hit) if hit or last else 0.0,
            "scores": float(hit),
            "environment_feedback": "" if hit or last else TURN.format(hint(guess, number)),
            "done": hit or last,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"guesses": self.guesses, "hit": float(hit), "nearest": self.nearest},
        }

    def reward(self, hit):
        if hit:
            return 1.0 - 0.5 * (self.guesses - 1) / (GUESSES - 1)
        return 0.25 * (1 - min(self.nearest, 100) / 100)


def last_number(text):
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found and len(found[-1]) < 10 else None


def hint(guess, number):
    if guess is None:
        return "That was not a number. Guess again."
    return "Higher. Guess again." if guess < number else "Lower. Guess again."


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(GuessingGame)
