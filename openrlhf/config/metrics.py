"""Every metric that a command logs: its name, its meaning, and how it looks in a healthy run.

`tools/write_reference.py` turns the table into docs/metrics.md, and a test checks that runs log no other name.
Upstream's names are kept, so that existing dashboards work. Some of them differ between commands for the same thing;
every command then also logs a common name (`loss_mean`, `eval_loss`, `acc_mean`).

A name may contain a field in braces, such as `eval_{dataset}_reward`. Reward functions and agents add more metrics with
`extra_logs`, under names that they choose.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["train", "eval"]

SUPERVISED = ("train_sft", "train_rm", "train_dpo", "train_kto", "train_kd", "train_prm")
RL = ("train_ppo",)  # and train_ppo_ray, which logs the same
PREFERENCES = ("train_rm", "train_dpo", "train_kto")


@dataclass(frozen=True)
class Metric:
    """A metric of some commands; `kind` says whether it is logged after steps or after evaluations."""

    name: str
    kind: Kind
    commands: tuple[str, ...]
    meaning: str
    healthy: str

    def matches(self, name: str) -> bool:
        """Return whether a logged name is that of this metric, with values for the fields in braces."""
        pattern = re.sub(r"\\\{\w+\\\}", ".+", re.escape(self.name))
        return re.fullmatch(pattern, name) is not None


def train(name: str, commands: tuple[str, ...], meaning: str, healthy: str) -> Metric:
    return Metric(name, "train", commands, meaning, healthy)


def evaluation(name: str, commands: tuple[str, ...], meaning: str, healthy: str) -> Metric:
    return Metric(name, "eval", commands, meaning, healthy)


def find_metric(kind: str, name: str, command: str) -> Metric | None:
    """Return the metric that a command logs under this name; None if the table does not have it."""
    for metric in METRICS:
        if metric.kind == kind and command in metric.commands and metric.matches(name):
            return metric
    return None


LOSSES = (
    train("loss_mean", SUPERVISED, "Loss of the step, in every supervised command.", "Falls, then levels off."),
    train("gpt_loss", ("train_sft", "train_kd"), "Mean negative log-likelihood per learned token.", "As loss_mean."),
    train("loss", ("train_rm", "train_dpo"), "Loss per pair.", "From 0.69 downwards (with --ipo, other values)."),
    train("kto_loss", ("train_kto",), "Loss per response.", "From 0.5 downwards."),
    train("prm_loss", ("train_prm",), "Cross-entropy per judged step.", "Falls, then levels off."),
    train(
        "distil_loss",
        ("train_kd",),
        "Cross-entropy with the teacher's distribution, per learned token.",
        "Falls towards the teacher's own entropy, not to 0.",
    ),
    train(
        "nll_loss",
        ("train_dpo",),
        "Negative log-likelihood of the chosen responses (`--nll_loss_coef`).",
        "Falls or stays; if it rises, the chosen responses become less likely too.",
    ),
    train(
        "aux_loss",
        (*SUPERVISED, *RL),
        "Load-balancing loss of a mixture of experts, over all tokens of the step (`--aux_loss_coef`).",
        "Near its minimum, the number of experts per token; higher means that few experts get most tokens.",
    ),
)

PREFERENCE = (
    train("acc", ("train_rm", "train_dpo"), "Share of pairs in which the chosen response wins.", "From 0.5 upwards."),
    train("acc", ("train_prm",), "Share of steps judged as labelled.", "Rises."),
    train("acc_mean", ("train_rm", "train_dpo", "train_prm"), "The same as acc.", "As acc."),
    train(
        "chosen_reward",
        PREFERENCES,
        "Mean reward of chosen (desirable) responses; in DPO and KTO, beta times the log-ratio to the reference.",
        "Above reject_reward, and the distance grows.",
    ),
    train("reject_reward", PREFERENCES, "The same for rejected (undesirable) responses.", "Below chosen_reward."),
    train(
        "kl",
        ("train_kto",),
        "KTO's baseline: an estimate of the KL from the reference, in nats per response.",
        "Slowly grows from 0; a jump means that the learning rate is too large.",
    ),
)

UTILIZATION = "Share of the GPU's half-precision peak that training reaches (MFU); absent if the peak is not known."
HEALTHY_UTILIZATION = "0.3 to 0.5 with large models and full micro-batches, less otherwise."
OPTIMIZER = (
    train("lr", SUPERVISED, "Learning rate of the step.", "Follows --lr_scheduler; 0 in the first step of a warm-up."),
    train("grad_norm", SUPERVISED, "Norm of the gradient before clipping.", "Steady; --max_norm limits the update."),
    train("loss_scale", SUPERVISED, "Loss scale in fp16.", "Rarely changes."),
    train("skipped_steps", SUPERVISED, "Optimizer steps skipped because fp16 gradients overflowed.", "A few."),
    train("mfu", SUPERVISED, UTILIZATION, HEALTHY_UTILIZATION),
    *(
        metric
        for model, prefix in (("policy", "actor"), ("critic", "critic"))
        for metric in (
            train(f"{prefix}_lr", RL, f"Learning rate of the {model}.", "Follows its schedule; above 0 from step 1."),
            train(f"{prefix}_grad_norm", RL, f"Norm of the {model}'s gradient before clipping.", "Steady."),
            train(f"{prefix}_loss_scale", RL, f"Loss scale of the {model} in fp16.", "Rarely changes."),
            train(f"{prefix}_skipped_steps", RL, f"Steps of the {model} skipped in fp16.", "A few."),
            train(f"{prefix}_mfu", RL, UTILIZATION.replace("training", f"training the {model}"), HEALTHY_UTILIZATION),
        )
    ),
)

REWARDS = (
    train("reward", RL, "Mean reward of the samples, after length penalties.", "Rises."),
    train("score", RL, "Mean of the scores that filtering and pass@k use; by default the rewards.", "Rises."),
    train(
        "return",
        RL,
        "Mean sum of the token rewards, after shaping and the KL penalty.",
        "About 0 with group estimators; otherwise rises.",
    ),
    train(
        "group_reward_std",
        RL,
        "Mean standard deviation of the rewards of a prompt's samples.",
        "Above 0: group estimators learn from this spread. It falls when a task is solved.",
    ),
    train("rollout/reward_std", RL, "Standard deviation of all rewards of the rollout.", "Above 0."),
    train("rollout/reward_max", RL, "Highest reward of a sample of the rollout.", "Above the mean."),
    train(
        "rollout/equal_groups",
        RL,
        "Share of prompts whose samples all got the same reward, from which group estimators learn nothing.",
        "Below 0.5; --dynamic_filtering replaces such prompts.",
    ),
    train("rollout/failures", RL, "Samples that failed and were skipped (--on_reward_error skip).", "Absent."),
    train("rollout/failures_total", RL, "The same since the start of the run.", "Absent."),
    train(
        "dynamic_filtering_pass_rate",
        RL,
        "Percentage of generated groups that --dynamic_filtering kept.",
        "Above 30; below that, most of the generation is wasted.",
    ),
    train(
        "rollout/aborted_groups",
        RL,
        "Prompts that were cancelled because their rollout was complete without them (--abort_stragglers).",
        "At most the prompts in progress beyond --rollout_batch_size.",
    ),
    train(
        "rollout/stale_groups",
        RL,
        "Prompts that were dropped and generated again because of --max_staleness.",
        "Absent or small; otherwise oversample less.",
    ),
    train("steps", RL, "Mean number of step rewards per sample (--step_rewards).", "Steady."),
)

LENGTHS = (
    train("response_length", RL, "Mean number of tokens that the policy wrote.", "No jump to the limit or to zero."),
    train("total_length", RL, "Mean number of tokens of a sample with prompt and environment.", "As response_length."),
    train("truncated", RL, "Share of responses that ended at the length limit.", "Below 0.1 after a few steps."),
)

POLICY = (
    train("policy_loss", RL, "Policy loss of the step.", "Around 0 without a trend: it is not a measure of success."),
    train(
        "kl",
        RL,
        "KL to the reference in nats per token, with --kl_estimator; absent without a reference.",
        "Grows slowly from 0 and stays below 0.5.",
    ),
    train("kl_coef", RL, "Weight of the KL.", "Constant, or adapting towards --kl_target."),
    train("kl_loss", RL, "KL term of the loss (--use_kl_loss), before its weight.", "As kl."),
    train(
        "rollout/entropy",
        RL,
        "Entropy of the policy in nats per token, estimated from the sampled tokens: the mean of -log p.",
        "Falls slowly. Near 0, the samples of a prompt no longer differ.",
    ),
    train("entropy", RL, "The exact entropy, measured only with --entropy_loss_coef.", "As rollout/entropy."),
    train(
        "ppo_kl",
        RL,
        "How far training on a rollout moved the policy: the mean of log p_old - log p.",
        "Below 0.1; exactly 0 with a single optimizer step per rollout.",
    ),
    train("ppo_clip_ratio", RL, "Share of tokens whose ratio was clipped.", "Below 0.2; 0 with a single step."),
    train(
        "engine_kl",
        RL,
        "Difference between engine and trainer on the sampled tokens: the mean of log p_engine - log p_old.",
        "Below 0.001 in fp32 and 0.01 in half precision; larger in asynchronous runs.",
    ),
    train("vllm_kl", RL, "The same as engine_kl, under OpenRLHF's name; only if vLLM generates.", "As engine_kl."),
    train(
        "rollout/log_prob_difference",
        RL,
        "Mean |log p_engine - log p_trainer| over some samples of the current weights.",
        "Below 0.001 in fp32 and 0.05 in half precision; above that, the run warns, and far above, it stops.",
    ),
    train(
        "is_filter_ratio",
        RL,
        "Share of tokens that importance correction dropped (--enable_vllm_is_correction).",
        "Below 0.05.",
    ),
    train(
        "staleness",
        RL,
        "Age of the oldest sample in weight versions: how many updates separate its generation from training on it.",
        "0 in synchronous runs, otherwise at most --async_queue_size or, with oversampling, --max_staleness.",
    ),
)

ROLLOUT_TIMES = (
    train(
        "timing/engines_busy",
        RL,
        "Share of the generation time during which an engine has work, averaged over engines.",
        "Near 1. Lower: few long responses keep a rollout open, or agents and rewards are slow.",
    ),
    train("timing/sample_p50", RL, "Median seconds of a sample, with the turns of its environment.", "Steady."),
    train("timing/sample_p95", RL, "Seconds within which 95% of the samples end.", "A few times the median at most."),
    train(
        "timing/sample_max",
        RL,
        "Seconds of the slowest sample; a synchronous rollout takes at least as long.",
        "Close to timing/sample_p95; far above it, oversample (--vllm_generate_batch_size).",
    ),
    train(
        "timing/reward_mean",
        RL,
        "Mean seconds of a reward call: a call of the reward function or server, or of reward models that filter"
        " groups. With an agent, rewards are part of the sample's time.",
        "Far below timing/sample_p50.",
    ),
    train("timing/reward_max", RL, "Seconds of the slowest of these calls.", "Below timing/sample_p50."),
    train(
        "timing/trainer_wait",
        RL,
        "Seconds for which the trainer waited for the rollout.",
        "About timing/generation in synchronous runs; near 0 in asynchronous ones, unless generation is slower.",
    ),
    train(
        "timing/queue_wait",
        RL,
        "Seconds for which the complete rollout waited for the trainer.",
        "Near 0 in synchronous runs; if high, generation is faster than training and could use fewer devices.",
    ),
    train(
        "staleness_mean",
        RL,
        "Mean age of the samples in weight versions; see staleness.",
        "At most staleness.",
    ),
)

CRITIC = (
    train("critic_loss", RL, "Half the squared error of the values.", "Falls, then follows the rewards."),
    train("values", RL, "Mean value of the tokens.", "Approaches the mean reward."),
    train("value_clip_ratio", RL, "Share of values that were clipped (--value_clip).", "Below 0.2 after a few steps."),
    train("critic_aux_loss", RL, "Load-balancing loss of the critic's experts.", "As aux_loss."),
)

TIMES = (
    train("timing/step_total", (*SUPERVISED, *RL), "Seconds of the step, without evaluation and saving.", "Steady."),
    train(
        "timing/tokens_per_second",
        (*SUPERVISED, *RL),
        "Tokens of the step's samples, with prompts, per second of step_total.",
        "Steady; compare it when you change batch sizes.",
    ),
    train("timing/generation", RL, "Seconds of generation and rewards; may overlap with training.", "Steady."),
    train("timing/make_experience", RL, "Seconds of scoring by reference, critic and reward models.", "Steady."),
    train("timing/ppo_train", RL, "Seconds of the optimizer steps.", "Steady."),
    train("timing/broadcast", RL, "Seconds of sending the weights to the engines.", "A small part of step_total."),
)

EVALUATION = (
    evaluation("eval_loss", SUPERVISED, "Loss on the evaluation set, in every supervised command.", "Falls."),
    evaluation("eval gpt_loss", ("train_sft", "train_kd"), "The same as eval_loss, for dashboards.", "Falls."),
    evaluation("eval prm_loss", ("train_prm",), "The same as eval_loss, for dashboards.", "Falls."),
    evaluation("acc_mean", ("train_rm", "train_dpo", "train_prm"), "Accuracy on the evaluation set.", "Rises."),
    evaluation("eval acc", ("train_prm",), "The same as acc_mean, for dashboards.", "Rises."),
    evaluation("distil_loss", ("train_kd",), "As in training.", "Falls."),
    evaluation("nll_loss", ("train_dpo",), "As in training.", "Falls or stays."),
    evaluation("chosen_reward", PREFERENCES, "As in training.", "Above reject_reward."),
    evaluation("reject_reward", PREFERENCES, "As in training.", "Below chosen_reward."),
    evaluation("kl", ("train_kto",), "As in training.", "Slowly grows from 0."),
    evaluation("aux_loss", SUPERVISED, "As in training.", "As in training."),
    evaluation("reward_mean", ("train_rm",), "Mean score; --normalize_reward subtracts it.", "Any value."),
    evaluation(
        "reward_std", ("train_rm",), "Standard deviation of the scores; --normalize_reward divides by it.", "Above 0."
    ),
    evaluation("eval_{dataset}_reward", RL, "Mean reward on the prompts of a data source.", "Rises."),
    evaluation(
        "eval_{dataset}_pass{k}",
        RL,
        "Probability that one of k samples is right (pass@k, unbiased); only if all scores are 0 or 1.",
        "Rises.",
    ),
    evaluation("eval_{dataset}_response_length_mean", RL, "Mean number of tokens per response.", "As response_length."),
    evaluation("eval_{dataset}_truncated_rate", RL, "Share of truncated responses.", "As truncated."),
    evaluation("eval_response_length_mean", RL, "The same over all data sources.", "As response_length."),
    evaluation("eval_truncated_rate", RL, "The same over all data sources.", "As truncated."),
    evaluation("eval_num_samples", RL, "Samples that were evaluated.", "Constant; fewer if some failed."),
)

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Losses": LOSSES,
    "Preferences and labels": PREFERENCE,
    "Optimizer": OPTIMIZER,
    "Rewards of rollouts": REWARDS,
    "Lengths of rollouts": LENGTHS,
    "Policy": POLICY,
    "Pace of rollouts": ROLLOUT_TIMES,
    "Critic": CRITIC,
    "Time": TIMES,
    "Evaluation": EVALUATION,
}
METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)
