"""This package: runs the ordinary command with ordinary flags, and reads the run's own timings.

Engine and models share one process and one GPU. At tiny scale the Transformers engine generates, so that the driver
starts in seconds; otherwise vLLM. `--extra` adds flags, which override those below.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from workloads import Workload

from openrlhf.api.start import prepare, run
from openrlhf.config.sections.rl import RolloutFlags
from openrlhf.monitor import Sink
from openrlhf.rl import rollouts
from openrlhf.types import Prompt, SamplingParams
from peers.measurement import Measurement, PeakMemory, Task, read_task, report, version_of


def main() -> None:
    task, peak = read_task(), PeakMemory()
    with peak.watch():
        run_workload(task)
    report(read_timings(task, peak.gib))


def run_workload(task: Task, sinks: Sequence[Sink] = ()) -> None:
    """Train on a workload as `openrlhf train_ppo_ray` does; `sinks` receive the metrics."""
    if not task.workload.is_uniform:
        rollouts.sampling = own_lengths(task.workload)
    run("train_ppo_ray", prepare("train_ppo_ray", flags(task)), sinks)


def flags(task: Task) -> list[str]:
    """Return the command line of a workload."""
    workload, folder = task.workload, task.folder
    given = {
        "pretrain": task.model,
        "prompt_data": folder / "prompts.jsonl",
        "runtime": "local",
        "actor_learning_rate": 1e-6,
        "rollout_batch_size": workload.prompts,
        "n_samples_per_prompt": workload.samples,
        "train_batch_size": workload.num_samples,
        "train_max_tokens_per_gpu": workload.micro_batch_tokens,
        "max_len": workload.context,
        "max_new_tokens": workload.longest,
        "min_new_tokens": min(workload.lengths),
        "vllm_num_engines": 0 if task.tiny else 1,
        "vllm_gpu_memory_utilization": task.memory,
        "actor_num_gpus_per_node": 1,
        "max_steps": task.steps,
        "save_path": folder / "ours",
        "run_dir": folder / "ours_run",
        "ckpt_path": folder / "ours_checkpoints",
    }
    switches = ["use_dynamic_batch", *([] if task.tiny else ["enable_prefix_caching", "deepcompile"])]
    if workload.has_critic:
        given |= {"advantage_estimator": "gae", "init_kl_coef": 0.01, "critic_learning_rate": 1e-6}
        given["reward_pretrain"] = folder / "reward_model"
        switches += [] if task.tiny else ["vllm_enable_sleep"]  # four models and the engine do not fit together
    else:
        given |= {"advantage_estimator": "group_norm", "init_kl_coef": 0, "remote_rm_url": folder / "reward.py"}
    pairs = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return [*pairs, *(f"--{name}" for name in switches), *task.extra]


def own_lengths(workload: Workload) -> Callable[[Prompt, RolloutFlags, int], list[SamplingParams]]:
    """Return `rollouts.sampling` with the workload's length for each response, which no flag can set."""
    plain = rollouts.sampling

    def sampling(prompt: Prompt, flags: RolloutFlags, seed: int) -> list[SamplingParams]:
        first = prompt.index % workload.prompts * workload.samples
        lengths = workload.lengths[first : first + workload.samples]
        params = plain(prompt, flags, seed)
        return [replace(one, max_tokens=length, min_tokens=length) for one, length in zip(params, lengths, strict=True)]

    return sampling


def read_timings(task: Task, peak_gib: float | None) -> Measurement:
    """Read the metrics of the run."""
    lines = [json.loads(line) for line in (task.folder / "ours_run" / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if line["kind"] == "train"]
    for row in rows:
        task.check_responses(round(row["response_length"] * task.workload.num_samples))
    columns = [[row[f"timing/{name}"] for row in rows] for name in ("step_total", "generation", "ppo_train")]
    return task.measured(f"openrlhf {version_of('openrlhf')}", *columns, peak_gib=peak_gib)


if __name__ == "__main__":
    main()
