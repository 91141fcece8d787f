"""The table of batch sizes that training commands print at start-up, so that you can check them.

Each line shows a derived number and how it was computed from the flags; `api/start.py` prints the table.
"""

from dataclasses import dataclass
from math import ceil

from openrlhf.config.checks.supervised import data_parallel_size
from openrlhf.config.commands import RLConfig, SupervisedConfig
from openrlhf.config.runtime import policy_ranks, resolve_runtime, steps_per_rollout


@dataclass(frozen=True)
class Line:
    """One derived number and how it was computed."""

    name: str
    value: str
    how: str


def supervised_table(config: SupervisedConfig) -> list[Line]:
    batches, longest = config.batches, config.data.max_len
    batch, micro = batches.train_batch_size, batches.micro_train_batch_size
    ranks = data_parallel_size(config)
    share = ceil(batch / ranks)
    return [
        Line("devices", str(ranks), "data-parallel processes"),
        Line("samples per step", f"{batch:,}", "--train_batch_size, over all devices"),
        Line("samples per device and step", f"{share:,}", f"{batch} / {ranks}"),
        Line("micro-batches per step", f"{ceil(share / micro):,}", f"of up to {micro} (--micro_train_batch_size)"),
        Line("tokens per step, at most", f"{batch * longest:,}", f"{batch} x --max_len {longest}"),
        Line("epochs", f"{batches.max_epochs:,}", "--max_epochs; a smaller last batch is also trained"),
    ]


def rl_table(config: RLConfig) -> list[Line]:
    rollout, batches = config.rollout, config.batches
    samples, ranks, context = rollout.samples_per_rollout, policy_ranks(config), rollout.context_length
    step = min(batches.train_batch_size, samples)
    steps, how = steps_per_rollout(config), f"{samples} / {batches.train_batch_size} x --max_epochs"
    runtime = f"--runtime {config.placement.runtime}, data-parallel devices of the policy: {ranks}"
    scored, trained = rollout.micro_rollout_batch_size, batches.micro_train_batch_size
    scorings, trainings = ceil(ceil(samples / ranks) / scored), ceil(ceil(step / ranks) / trained)
    if rollout.use_dynamic_batch:
        scoring = ("by tokens", f"up to {rollout.scoring_token_budget:,} tokens each")
        training = ("by tokens", f"up to {rollout.train_max_tokens_per_gpu:,} tokens each")
    else:
        scoring = (f"{scorings:,}", f"per device, of up to {scored} (--micro_rollout_batch_size)")
        training = (f"{trainings:,}", f"per device and step, of up to {trained} (--micro_train_batch_size)")
    return [
        Line("runtime", resolve_runtime(config), runtime),
        Line("prompts per rollout", f"{rollout.rollout_batch_size:,}", "--rollout_batch_size"),
        Line("samples per rollout", f"{samples:,}", f"x --n_samples_per_prompt {rollout.n_samples_per_prompt}"),
        Line("scoring micro-batches", *scoring),
        Line("samples per optimizer step", f"{step:,}", "--train_batch_size, over all devices"),
        Line("training micro-batches", *training),
        Line("optimizer steps per rollout", f"{steps:,}", how),
        Line("tokens per step, at most", f"{step * context:,}", f"x {context} (context)"),
        Line("passes over the prompts", f"{rollout.num_episodes:,}", "--num_episodes"),
    ]


def render(lines: list[Line]) -> str:
    names, values = max(len(line.name) for line in lines), max(len(line.value) for line in lines)
    return "\n".join(f"  {line.name:<{names}}  {line.value:>{values}}  {line.how}".rstrip() for line in lines)
