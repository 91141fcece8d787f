"""Signs that reinforcement learning is going wrong, found in the numbers of each step.

    rewards          nothing to learn: all samples of each prompt have the same reward, at its highest or not
    truncation       nearly all responses end at the length limit
    KL               the policy writes text that the reference would hardly ever write
    entropy          the policy repeats itself without getting better
    gradient norm    a step is far larger than the others

After each step the controller passes its numbers to `RLHealth`, and prints the lines that it returns. A line appears
once per run, after several steps in a row, and suggests a remedy. As in `training/health.py`, healthy runs stay far
from the thresholds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import uses_critic
from openrlhf.config.sections.algorithm import GROUP_ESTIMATORS
from openrlhf.training.health import NormWatch
from openrlhf.training.run_directory import run_folder

IN_A_ROW = 3  # consecutive steps with the same finding: a single rollout may be unusual
TRUNCATED = 0.95  # share of responses; a policy that ends its answers truncates far fewer, even early in training
HIGH_KL = 2.0  # nats per token: the sampled tokens are e^2 times less likely under the reference; 0.01 to 0.5 is usual
EQUAL = 0.95  # share of prompts whose samples all have the same reward, above which little can be learned
RARE = 0.1  # mean reward as a share of the best one, below which samples are hardly ever rewarded
FIRST_STEPS = 5  # steps that later ones are compared with
ENTROPY_LEFT = 0.1  # share of the initial entropy


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """The numbers of one step that show whether it was healthy; None if the step did not compute them."""

    step: int
    reward: float  # mean over the samples
    reward_std: float  # over the samples
    reward_max: float  # over the samples
    equal_groups: float | None = None  # share of prompts whose samples all have the same reward
    truncated: float = 0.0  # share of responses that ended at the length limit
    entropy: float | None = None  # nats per token
    kl: float | None = None  # nats per token
    policy_norm: float | None = None  # gradient norms
    critic_norm: float | None = None

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, float]) -> StepNumbers:
        return cls(
            step=step,
            reward=metrics["reward"],
            reward_std=metrics["rollout/reward_std"],
            reward_max=metrics["rollout/reward_max"],
            equal_groups=metrics.get("rollout/equal_groups"),
            truncated=metrics["truncated"],
            entropy=metrics.get("rollout/entropy"),
            kl=metrics.get("kl"),
            policy_norm=metrics.get("actor_grad_norm"),
            critic_norm=metrics.get("critic_grad_norm"),
        )


@dataclass
class RLHealth:
    """Checks on the steps of a run; after a resume they start over."""

    config: RLConfig
    first: list[StepNumbers] = field(default_factory=list)  # the first FIRST_STEPS steps
    best: float = float("-inf")  # highest reward of a sample so far
    varied: bool = False  # the rewards of an earlier step differed
    in_a_row: Counter[str] = field(default_factory=Counter)  # consecutive steps with each finding
    reported: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        flags = self.config.optimizer
        self.policy_norms = NormWatch(flags.max_norm > 0, "the policy's ", "--actor_learning_rate")
        self.critic_norms: NormWatch | None = None
        if uses_critic(self.config):
            self.critic_norms = NormWatch(flags.critic.max_norm > 0, "the critic's ", "--critic_learning_rate")

    def check(self, numbers: StepNumbers) -> list[str]:
        """Return the lines to print after a step."""
        findings = {
            "no signal": self._no_signal(numbers),
            "saturated": self._saturated(numbers),
            "truncated": self._truncated(numbers),
            "kl": self._high_kl(numbers),
            "entropy": self._low_entropy(numbers),
        }
        lines: list[str] = []
        for name, finding in findings.items():
            self.in_a_row[name] = self.in_a_row[name] + 1 if finding else 0
            if finding and self.in_a_row[name] >= IN_A_ROW and name not in self.reported:
                self.reported.add(name)
                lines.append(f"step {numbers.step}: for {IN_A_ROW} steps in a row, {finding}")
        lines += self.policy_norms.check(numbers.step, numbers.policy_norm)
        if self.critic_norms is not None:
            lines += self.critic_norms.check(numbers.step, numbers.critic_norm)
        if len(self.first) < FIRST_STEPS:
            self.first.append(numbers)
        self.best = max(self.best, numbers.reward_max)
        self.varied = self.varied or numbers.reward_std > 0
        return lines

    def _teaches_nothing(self, numbers: StepNumbers) -> bool:
        """Return whether rewards differ too little to learn from."""
        within_groups = self.config.advantage.advantage_estimator in GROUP_ESTIMATORS
        equal = (numbers.equal_groups or 0.0) if within_groups else 0.0
        rarely_rewarded = numbers.reward < RARE * max(self.best, numbers.reward_max)  # otherwise the task is solved
        return numbers.reward_std == 0 or equal == 1 or (equal >= EQUAL and rarely_rewarded)

    def _is_saturated(self, numbers: StepNumbers) -> bool:
        return self.varied and numbers.reward_std == 0 and numbers.reward >= self.best

    def _no_signal(self, numbers: StepNumbers) -> str | None:
        if not self._teaches_nothing(numbers) or self._is_saturated(numbers):
            return None
        every = f"every sample got the reward {numbers.reward:g}"
        share = "each prompt" if numbers.equal_groups == 1 else f"{numbers.equal_groups or 0.0:.0%} of the prompts"
        which = every if numbers.reward_std == 0 else f"all samples of {share} got the same reward"
        return (
            f"{which}, so there is nothing to learn from them. Try: check the reward on the samples in "
            f"{run_folder(self.config) / 'rollouts'}; if it is right, easier or harder prompts, a reward with partial "
            "credit, or more --n_samples_per_prompt"
        )

    def _saturated(self, numbers: StepNumbers) -> str | None:
        if not self._is_saturated(numbers):
            return None
        return (
            f"every sample got the highest reward of the run, {numbers.reward:g}, so there is nothing left to learn. "
            "Try: stop here, harder prompts, or a stricter reward"
        )

    def _truncated(self, numbers: StepNumbers) -> str | None:
        if numbers.truncated < TRUNCATED:
            return None
        flags = self.config.rollout
        limit = "--max_len" if flags.max_len is not None else "--generate_max_len"
        limit = "--max_new_tokens" if flags.max_new_tokens is not None else limit
        return (
            f"{numbers.truncated:.0%} of the responses ended at the length limit ({flags.longest_response} tokens), so "
            f"the policy never sees the end of an answer rewarded. Try: a larger {limit}, or check that the prompts "
            "follow the model's template (--apply_chat_template); ignore this if all responses should be that long"
        )

    def _high_kl(self, numbers: StepNumbers) -> str | None:
        if numbers.kl is None or numbers.kl < HIGH_KL:
            return None
        return (
            f"the KL to the reference was above {HIGH_KL:g} nats per token (now {numbers.kl:.3g}): the policy writes "
            "text that the reference finds very unlikely, and a reward model may be wrong about it. Try: a smaller "
            f"--actor_learning_rate, or a larger --init_kl_coef than {self.config.kl.init_kl_coef:g}"
        )

    def _low_entropy(self, numbers: StepNumbers) -> str | None:
        """Report a collapsed entropy unless the reward has risen, as it does when the policy masters an exact task."""
        if numbers.entropy is None or len(self.first) < FIRST_STEPS:
            return None
        start = median(item.entropy or 0.0 for item in self.first)
        # A rollout without action tokens has an entropy of NaN, which is not below any threshold.
        if not numbers.entropy < ENTROPY_LEFT * start or numbers.reward > fmean(item.reward for item in self.first):
            return None
        return (
            f"the entropy was below a tenth of its initial value (now {numbers.entropy:.2g} nats per token, at first "
            f"{start:.2g}), and the reward is not higher: the policy repeats itself. Try: an earlier checkpoint with a "
            "smaller --actor_learning_rate, a larger --init_kl_coef, or --entropy_loss_coef 0.001"
        )
