"""The table of batch sizes that training commands print at start-up, so that you can check them before the run."""

from dataclasses import dataclass

from openrlhf.config.checks.supervised import data_parallel_size
from openrlhf.config.commands import RLConfig, SupervisedConfig
from openrlhf.config.runtime import num_devices, resolve_runtime


@dataclass(frozen=True)
class Line:
    """One derived number and how it was computed."""

    name: str
    value: str
    how: str


def supervised_table(config: SupervisedConfig) -> list[Line]:
    batch, micro = config.batches.train_batch_size, config.batches.micro_train_batch_size
    ranks = data_parallel_size(config)
    share = ceil_div(batch, ranks)
    tokens = batch * config.data.max_len
    return [
        Line("devices", str(ranks), "data-parallel processes"),
        Line("samples per step", number(batch), "--train_batch_size, over all devices"),
        Line("samples per device and step", number(share), f"{batch} / {ranks}"),
        Line("micro-batches per step", number(ceil_div(share, micro)), f"of up to {micro} (--micro_train_batch_size)"),
        Line("tokens per step, at most", number(tokens), f"{batch} x --max_len {config.data.max_len}"),
        Line("epochs", number(config.batches.max_epochs), "--max_epochs; the last, smaller batch is trained too"),
    ]


def rl_table(config: RLConfig) -> list[Line]:
    rollout, batches = config.rollout, config.batches
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    ranks = num_devices(config, "actor") // (config.sharding.ring_attn_size * config.sharding.ds_tensor_parallel_size)
    step = min(batches.train_batch_size, samples)
    steps = ceil_div(samples, batches.train_batch_size) * batches.max_epochs
    runtime = resolve_runtime(config)
    return [
        Line(
            "runtime", runtime, f"--runtime {config.placement.runtime}, {ranks} data-parallel device(s) for the policy"
        ),
        Line("prompts per rollout", number(rollout.rollout_batch_size), "--rollout_batch_size"),
        Line("samples per rollout", number(samples), f"x --n_samples_per_prompt {rollout.n_samples_per_prompt}"),
        Line("scoring micro-batches", *scoring(config, samples, ranks)),
        Line("samples per optimizer step", number(step), "--train_batch_size, over all devices"),
        Line("training micro-batches", *training(config, step, ranks)),
        Line("optimizer steps per rollout", number(steps), f"{samples} / {batches.train_batch_size} x --max_epochs"),
        Line(
            "tokens per step, at most", number(step * rollout.context_length), f"x {rollout.context_length} (context)"
        ),
        Line("passes over the prompts", number(rollout.num_episodes), "--num_episodes"),
    ]


def scoring(config: RLConfig, samples: int, ranks: int) -> tuple[str, str]:
    if config.rollout.use_dynamic_batch:
        return "by tokens", f"up to {number(config.rollout.scoring_token_budget)} tokens each"
    size = config.rollout.micro_rollout_batch_size
    return number(ceil_div(ceil_div(samples, ranks), size)), f"per device, of up to {size} (--micro_rollout_batch_size)"


def training(config: RLConfig, step: int, ranks: int) -> tuple[str, str]:
    if config.rollout.use_dynamic_batch:
        return "by tokens", f"up to {number(config.rollout.train_max_tokens_per_gpu)} tokens each"
    size = config.batches.micro_train_batch_size
    return number(
        ceil_div(ceil_div(step, ranks), size)
    ), f"per device and step, of up to {size} (--micro_train_batch_size)"


def render(lines: list[Line]) -> str:
    names, values = max(len(line.name) for line in lines), max(len(line.value) for line in lines)
    return "\n".join(f"  {line.name:<{names}}  {line.value:>{values}}  {line.how}" for line in lines)


def ceil_div(total: int, part: int) -> int:
    return -(-total // part)


def number(value: int) -> str:
    return f"{value:,}"
