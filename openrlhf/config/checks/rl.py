"""Rules of reinforcement learning: prompts, rollouts, rewards, advantages and losses."""

from openrlhf.config.checks.rule import Changed, change
from openrlhf.config.commands import RLConfig
from openrlhf.config.in_memory import is_in_memory
from openrlhf.config.runtime import policy_ranks
from openrlhf.config.sections.algorithm import GROUP_ESTIMATORS
from openrlhf.config.sections.rl import GENERATE_MAX_LEN
from openrlhf.config.urls import mask_urls
from openrlhf.errors import ConfigError, counted, listed


def a_reward_is_given(config: RLConfig) -> None:
    """Require a source of rewards: a model, a server, a function or an agent."""
    rewards = config.rewards
    if not (rewards.reward_pretrain or rewards.remote_rm_url or rewards.agent_func_path):
        raise ConfigError(
            "no source of rewards is given: expected --reward_pretrain, --remote_rm_url or --agent_func_path",
            try_this="--remote_rm_url ./reward_func.py",
        )


def reward_addresses_are_http_or_python(config: RLConfig) -> None:
    """Reject reward addresses that are neither URLs nor .py files before the first reward request fails."""
    for address in config.rewards.reward_servers:
        if not address.startswith(("http://", "https://")):
            raise ConfigError(
                f"--remote_rm_url {mask_urls(address)} is neither a .py file nor an http(s) address",
                try_this="--remote_rm_url http://127.0.0.1:5000/get_reward",
            )


def agents_are_python_files(config: RLConfig) -> None:
    """Require a .py file as the agent, because it is imported; Python callers may pass an object."""
    path = config.rewards.agent_func_path
    if path and not path.endswith(".py") and not is_in_memory(path):
        raise ConfigError(f"--agent_func_path {path} is not a .py file")


def reward_weights_match_models(config: RLConfig) -> None:
    """Require one weight per reward model; they are matched by position."""
    weights, models = config.rewards.reward_weights, config.rewards.reward_models
    if weights and len(weights) != len(models):
        raise ConfigError(
            f"--reward_weights has {counted(len(weights), 'value')}, but --reward_pretrain names"
            f" {counted(len(models), 'model')}"
        )


def groups_have_several_samples(config: RLConfig) -> None:
    """Require several samples per prompt for group estimators, which compare them, and for dynamic filtering."""
    n, estimator = config.rollout.n_samples_per_prompt, config.advantage.advantage_estimator
    compares, filters = estimator in GROUP_ESTIMATORS, config.rollout.dynamic_filtering
    if n < 2 and (compares or filters):
        use = f"--advantage_estimator {estimator} compares the samples of a prompt" if compares else None
        raise ConfigError(
            f"{use or '--dynamic_filtering filters by the mean score of a group'}, but --n_samples_per_prompt is {n}",
            try_this="--n_samples_per_prompt 8",
        )


def group_estimators_do_not_discount(config: RLConfig) -> Changed[RLConfig] | None:
    """Set gamma to 1 for group estimators, which give all tokens of a response the same advantage."""
    estimator, gamma = config.advantage.advantage_estimator, config.advantage.gamma
    if estimator in GROUP_ESTIMATORS and gamma != 1.0:
        return change(
            config, f"--gamma {gamma} is set to 1: {estimator} gives one reward to the whole response", gamma=1.0
        )
    return None


def only_gae_has_a_critic(config: RLConfig) -> Changed[RLConfig] | None:
    """Drop flags of the critic that would fail or train nothing with estimators other than gae, which use none."""
    unused: dict[str, object] = {}
    if config.critic.critic_pretrain:
        unused["critic_pretrain"] = None
    if config.policy.freezing_actor_steps > 0:  # would train neither model in these steps
        unused["freezing_actor_steps"] = -1
    estimator = config.advantage.advantage_estimator
    if not unused or estimator == "gae":
        return None
    given = listed([f"--{name}" for name in unused])
    ignored = "are ignored" if len(unused) > 1 else "is ignored"
    return change(config, f"{given} {ignored}: --advantage_estimator {estimator} uses no critic", **unused)


def rings_and_dynamic_batches_pack(config: RLConfig) -> Changed[RLConfig] | None:
    """Turn packing on for ring attention, which splits packed sequences, and for batches that are limited by tokens."""
    ring, dynamic = config.sharding.ring_attn_size > 1, config.rollout.use_dynamic_batch
    if (ring or dynamic) and not config.batches.packing_samples:
        why = "--ring_attn_size splits packed sequences" if ring else "--use_dynamic_batch packs by tokens"
        return change(config, f"--packing_samples is turned on: {why}", packing_samples=True)
    return None


def kl_estimator_suits_its_place(config: RLConfig) -> str | None:
    """Warn if the KL estimator does not suit the use of the KL term.

    On policy, the gradient of k1 has mean zero, so k1 has no effect as a loss; k2 and k3 are designed for the loss.
    """
    estimator, in_loss = config.kl.kl_estimator, config.kl.use_kl_loss
    if in_loss and estimator == "k1":
        return "--use_kl_loss with --kl_estimator k1 has a zero-mean gradient; k2 or k3 is meant for the loss"
    if not in_loss and estimator != "k1":
        return f"--kl_estimator {estimator} is meant for the loss (--use_kl_loss); k1 is unbiased in the reward"
    return None


def ranges_are_intervals(config: RLConfig) -> None:
    """Reject empty ranges: no group would pass the filter, and rewards cannot be clipped to an empty range."""
    ranges = {"reward_clip_range": config.rewards.reward_clip_range}
    if config.rollout.dynamic_filtering:
        ranges["dynamic_filtering_reward_range"] = config.rollout.dynamic_filtering_reward_range
    for name, (low, high) in ranges.items():
        if not low < high:
            example = "-10 10" if name == "reward_clip_range" else "0 1"
            raise ConfigError(
                f"--{name} {low} {high} is an empty range: expected low < high", try_this=f"--{name} {example}"
            )


def scoring_batches_cover_the_devices(config: RLConfig) -> str | None:
    """Warn about fewer scoring micro-batches than devices, which is correct but leaves devices idle."""
    batches = -(-config.rollout.samples_per_rollout // config.rollout.micro_rollout_batch_size)
    ranks = policy_ranks(config)
    if batches < ranks and not config.rollout.use_dynamic_batch:
        return (
            f"a rollout has too few scoring micro-batches: {batches} for {ranks} devices, so some devices will be idle"
        )
    return None


def rollouts_divide_into_steps(config: RLConfig) -> str | None:
    """Report optimizer steps with fewer samples than --train_batch_size; their loss is averaged over fewer samples."""
    samples = config.rollout.samples_per_rollout
    step = config.batches.train_batch_size
    if samples < step:
        given = counted(samples, "sample")
        return f"a rollout has {given}, fewer than --train_batch_size {step}: every step uses the whole rollout"
    if samples % step:
        return f"a rollout has {samples} samples, so its last step has {samples % step}, not --train_batch_size {step}"
    return None


def clip_range_is_positive(config: RLConfig) -> None:
    """Reject a lower clip bound (1 - low) of 0 or less: ratios are positive, so it would never clip."""
    given, (low, high) = config.policy.eps_clip_low_high, config.policy.clip_range
    if not (0 <= low < 1 and high >= 0):
        flag = f"--eps_clip_low_high {low} {high}" if given else f"--eps_clip {low}"
        raise ConfigError(
            f"{flag}: the ratio is clipped to [1 - low, 1 + high], so low must be in [0, 1) and high 0 or more",
            try_this="--eps_clip_low_high 0.2 0.28",
        )


def gspo_clips_narrowly(config: RLConfig) -> str | None:
    """Warn about a wide clip range with GSPO: a sequence's ratio stays much closer to 1 than a token's."""
    if config.policy.policy_loss_type == "gspo" and max(config.policy.clip_range) >= 0.1:
        return "gspo averages the ratio over a sequence, which keeps it close to 1: try --eps_clip_low_high 3e-4 4e-4"
    return None


def overlong_buffer_fits_the_response(config: RLConfig) -> None:
    """Require an overlong buffer no longer than the longest response."""
    buffer = config.rewards.overlong_buffer_len
    limit = config.rollout.longest_response
    if buffer is not None and buffer > limit:
        raise ConfigError(f"--overlong_buffer_len {buffer:g} exceeds the maximum response length of {limit} tokens")


def shortest_response_fits(config: RLConfig) -> None:
    """Require a minimum length that a response can reach."""
    least, limit = config.rollout.min_new_tokens, config.rollout.longest_response
    if least > limit:
        raise ConfigError(
            f"--min_new_tokens {least} exceeds the maximum response length of {limit} tokens",
            try_this=f"--min_new_tokens {limit}",
        )


def stop_strings_are_not_empty(config: RLConfig) -> None:
    """Reject an empty stop string, which would end every response after its first token."""
    if "" in config.rollout.stop:
        raise ConfigError("--stop has an empty string, which every response contains", try_this="no --stop")


def context_leaves_room(config: RLConfig) -> None:
    """Require a context longer than the response, to leave room for a prompt."""
    new, context = config.rollout.max_new_tokens, config.rollout.context_length
    if new is not None and new >= context:
        raise ConfigError(
            f"--max_new_tokens {new} leaves no room for a prompt in a context of {context} tokens",
            try_this=f"--max_len {2 * new}",
        )


def generate_max_len_within_max_len(config: RLConfig) -> Changed[RLConfig] | None:
    """Treat --generate_max_len as --max_new_tokens if --max_len is given too.

    Scripts for 0.9.7 and earlier pass both; later ones pass only --max_len, so that a response can fill the context.
    """
    rollout = config.rollout
    given = rollout.generate_max_len != GENERATE_MAX_LEN
    if given and rollout.max_len is not None and rollout.max_new_tokens is None:
        line = f"--generate_max_len {rollout.generate_max_len} together with --max_len is treated as --max_new_tokens"
        return change(config, line, max_new_tokens=rollout.generate_max_len)
    return None


def evaluation_needs_eval_steps(config: RLConfig) -> str | None:
    """Warn about evaluation data with --eval_steps -1, which in RL means never and is probably a mistake."""
    if config.prompts.evaluates and config.logs.eval_steps == -1:
        flag = "--eval_dataset" if config.prompts.eval_size is None else "--eval_size"
        return f"{flag} is given but --eval_steps is -1: the policy is evaluated only at step 0"
    return None
