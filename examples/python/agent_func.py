"""Up to three attempts: a wrong answer is sent back, and a correct answer on a later attempt is worth less.

The label is the answer. A response is correct if its last \\boxed{...}, or the whole response, matches the label.

    python -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-1.5B-Instruct --prompt_data zhuzilin/dapo-math-17k \\
        --input_key prompt --label_key label --apply_chat_template --advantage_estimator reinforce_baseline \\
        --n_samples_per_prompt 8 --max_new_tokens 1024 --agent_func_path examples/python/agent_func.py
"""

from openrlhf.utils import extract_boxed_answer, grade_answer
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

TRIES = 3
AGAIN = "<|im_end|>\n<|im_start|>user\nThat is wrong. Try again.<|im_end|>\n<|im_start|>assistant\n"  # Qwen's marks


class AgentInstance(AgentInstanceBase):
    """One question, up to TRIES answers."""

    def __init__(self, *args, **kwargs):
        self.tries = 0

    async def step(self, states, **kwargs):
        self.tries += 1
        said = states["action_text"].removesuffix("<|im_end|>")
        right = grade_answer(extract_boxed_answer(said) or said, states["label"])
        done = right or self.tries == TRIES
        return {
            "rewards": 1.0 / self.tries if right else 0.0,
            "scores": float(right),
            "environment_feedback": "" if done else AGAIN,
            "done": done,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"tries": self.tries},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
