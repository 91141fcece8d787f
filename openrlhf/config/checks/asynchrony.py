"""Rules about samples that are older than the weights: queue, surplus, staleness and importance correction."""

from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import (
    generates_in_lockstep,
    is_asynchronous,
    staleness_limit,
    surplus_groups,
    uses_correction,
)
from openrlhf.errors import ConfigError, counted


def partial_rollout_needs_async(config: RLConfig) -> None:
    """Reject --partial_rollout in synchronous runs, which have no unfinished samples at a weight sync."""
    if config.asynchrony.partial_rollout and not config.asynchrony.async_train:
        raise ConfigError("--partial_rollout needs generation to run during training", try_this="--async_train")


def empty_queue_is_synchronous(config: RLConfig) -> str | None:
    """Warn that --async_queue_size 0 makes --async_train synchronous."""
    if config.asynchrony.async_train and config.asynchrony.async_queue_size == 0:
        return "--async_queue_size 0 makes training synchronous, as without --async_train"
    return None


def oversampling_needs_async(config: RLConfig) -> str | None:
    """Reject oversampling in synchronous runs unless the surplus is aborted: they train only on current samples."""
    asked, size = config.rollout.vllm_generate_batch_size, config.rollout.rollout_batch_size
    if asked is None or asked <= size:
        return None
    if not is_asynchronous(config) and not config.rollout.abort_stragglers:
        raise ConfigError(
            f"--vllm_generate_batch_size {asked} exceeds --rollout_batch_size {size}, but a synchronous run"
            " cannot use the surplus",
            try_this=f"--async_train, --abort_stragglers, or --vllm_generate_batch_size {size}",
        )
    if generates_in_lockstep(config):
        return (
            f"--vllm_generate_batch_size {asked} is limited to the {size} prompts of a rollout: without vLLM, prompts "
            "that finish early do not make a rollout in one process faster"
        )
    return None


def samples_may_wait_for_the_queue(config: RLConfig) -> None:
    """Reject --max_staleness below --async_queue_size: samples would be dropped while they wait in the queue."""
    limit, size = config.asynchrony.max_staleness, config.asynchrony.async_queue_size
    if config.asynchrony.async_train and limit is not None and limit < size:
        raise ConfigError(
            f"--max_staleness {limit} is below --async_queue_size {size}, so samples would be dropped while they wait "
            "in the queue",
            try_this=f"--async_queue_size {limit}",
        )


def thresholds_are_an_interval(config: RLConfig) -> None:
    """Require a valid interval of importance weights."""
    given = config.policy.vllm_is_truncated_threshold
    if len(given) not in (1, 2):
        raise ConfigError(
            f"--vllm_is_truncated_threshold expects one or two values, got {len(given)}",
            try_this="--vllm_is_truncated_threshold 0.5 5.0",
        )
    low, high = config.policy.correction_range
    if not 0 <= low < high:
        raise ConfigError(
            f"--vllm_is_truncated_threshold {low} {high} is not a valid interval of importance weights: expected "
            "0 <= low < high",
            try_this="--vllm_is_truncated_threshold 0.5 5.0",
        )


def correction_needs_the_whole_distribution(config: RLConfig) -> str | None:
    """Require engine log-probs over the whole vocabulary, like the trainer's, if the correction compares them."""
    rollout, limits = config.rollout, config.rollout.limits_on_tokens
    if not (uses_correction(config) and limits):
        return None
    name = limits[0].split()[0]
    if not rollout.whole_log_probs:
        by_default = config.policy.enable_vllm_is_correction is None
        reason = "--async_train turns correction on" if by_default else "--enable_vllm_is_correction is given"
        raise ConfigError(
            f"{reason}, but {limits[0]} excludes tokens at --temperature {rollout.temperature:g}: the engine's "
            "log-probs are renormalised over the remaining tokens, which makes all importance weights too small",
            try_this=f"--temperature 1, no {name}, or --enable_vllm_is_correction false",
        )
    return f"importance correction compares log-probs over the whole vocabulary, although {limits[0]} excludes tokens"


def old_samples_are_corrected(config: RLConfig) -> str | None:
    """Report how stale samples may be and whether importance correction is on."""
    if not is_asynchronous(config):
        return None
    versions, given = config.asynchrony.async_queue_size, config.policy.enable_vllm_is_correction
    oldest = staleness_limit(config) if surplus_groups(config) else versions
    age = f"--async_train trains on samples up to {counted(versions, 'update')} old"
    if oldest is None:
        age += ", and more in the surplus of --vllm_generate_batch_size"
    elif oldest > versions:
        age = f"--async_train trains on samples up to {counted(oldest, 'update')} old"
    if given is None:
        return f"{age}: importance correction is on (--enable_vllm_is_correction false switches it off)"
    if given:
        return None
    if config.rollout.limits_on_tokens and not config.rollout.whole_log_probs:
        return f"warning: {age}, and with --enable_vllm_is_correction false nothing corrects for their age"
    return f"warning: {age}, and with --enable_vllm_is_correction false only the clip range limits their effect"


def log_probs_can_be_compared(config: RLConfig) -> str | None:
    """Report that log-probs are not compared, because truncated sampling changes those of the engine."""
    given = config.rollout.limits_on_log_probs
    if config.engines.vllm_num_engines and given:
        return (
            f"the log-probs of engine and trainer are not compared, because {given[0]} excludes tokens in the "
            "engine; weight syncs are verified by checksums alone"
        )
    return None
