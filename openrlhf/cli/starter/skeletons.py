"""Files to start from, which `openrlhf init` writes for tasks with a reward function or an agent."""

REWARD = '''"""A reward function: 1 if the response contains the answer in its row, else 0. Replace it with your own."""


def reward_func(queries, prompts, labels, **kwargs):
    """Score the samples of one prompt; `queries` are prompts with responses, `labels` the values of --label_key."""
    responses = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    right = [float(str(label) in response) for response, label in zip(responses, labels, strict=True)]
    return {
        "rewards": right,
        "scores": right,  # 0 to 1: used by --dynamic_filtering and pass@k
        "extra_logs": {"characters": [len(response) for response in responses]},
    }
'''

AGENT = '''"""A multi-turn agent: three attempts, with feedback after a wrong one. Replace `step` with your own."""

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

ATTEMPTS = 3
# The text between two turns must contain the marks of the model's chat template; these are Qwen's.
FEEDBACK = "<|im_end|>\\n<|im_start|>user\\nThat is wrong. Try again.<|im_end|>\\n<|im_start|>assistant\\n"


class Environment(AgentInstanceBase):
    """One episode; every sample gets a new instance."""

    def __init__(self, *args, **kwargs):
        self.attempts = 0

    async def step(self, states, **kwargs):
        """Judge the policy's last message, `states["action_text"]`; `states["label"]` is the value of --label_key."""
        self.attempts += 1
        right = str(states["label"]) in states["action_text"]
        done = right or self.attempts == ATTEMPTS
        return {
            "rewards": float(right),
            "scores": float(right),  # 0 to 1: used by --dynamic_filtering and pass@k
            "environment_feedback": "" if done else FEEDBACK,
            "done": done,
            "extra_logs": {"attempts": self.attempts},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Environment)
'''
