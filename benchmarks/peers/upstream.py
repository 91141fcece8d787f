"""OpenRLHF, from a folder given by --upstream_folder, with its hybrid engine on Ray.

Its package has the same name as ours, so it runs in a process whose PYTHONPATH has that folder and not our repository.
The flags are the dotted ones of 0.10.2 and later. Attention is SDPA, which needs no further package; activations are
recomputed, because its log-probs materialise logits. It has no minimum length, but a model with random weights hardly
ever samples EOS: about twice in a rollout of W1. Seconds are those that its trainer prints after each step.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from peers.measurement import PeakMemory, Task, read_task, report

REPOSITORY = Path(__file__).resolve().parents[2]
# Its own reward processes expect tensors.
REWARD = """
import torch

def reward_func(queries, prompts, labels, **_):
    rewards = torch.tensor([sum(map(ord, query[-9:])) % 10 / 10 for query in queries])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
"""
STEP = re.compile(r"Global step \d+: \{(.*)\}")
TIMING = re.compile(r"'timing/(\w+)': ([\d.e+-]+)")


def main() -> None:
    task = read_task()
    if task.upstream is None or not (task.upstream / "openrlhf").is_dir():
        raise SystemExit(
            "--upstream_folder names no clone of OpenRLHF (git clone https://github.com/OpenRLHF/OpenRLHF)"
        )
    (task.folder / "upstream_reward.py").write_text(REWARD)
    peak = PeakMemory()
    with peak.watch():
        lines = run(task)
    timings = list(read_timings(lines))
    if len(timings) < task.steps:
        raise SystemExit(f"it reported {len(timings)} steps: expected {task.steps}")
    columns = [[timing[name] for timing in timings] for name in ("step_total", "generation", "ppo_train")]
    report(task.measured(f"OpenRLHF {version_in(task.upstream)}", *columns, peak_gib=peak.gib))


def run(task: Task) -> list[str]:
    """Run the command and return the lines that it prints; pass them on to stderr."""
    command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags(task)]
    environment = os.environ | {"PYTHONPATH": clean_path(task.upstream, os.environ.get("PYTHONPATH", ""))}
    lines = []
    with subprocess.Popen(
        command, cwd=task.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            sys.stderr.write(line)
            lines.append(line)
    if process.returncode:
        raise SystemExit(f"it ended with exit code {process.returncode}: {lines[-1].strip() if lines else 'no output'}")
    return lines


def clean_path(upstream: Path | None, path: str) -> str:
    """Return a PYTHONPATH with the folder of OpenRLHF first, and without our repository."""
    others = [part for part in path.split(os.pathsep) if part and Path(part).resolve() != REPOSITORY]
    return os.pathsep.join([str(upstream), *others])


def flags(task: Task) -> list[str]:
    """Return its command line for a workload."""
    workload, folder = task.workload, task.folder
    given = {
        "actor.model_name_or_path": task.model,
        "data.prompt_dataset": folder / "prompts.jsonl",
        "data.input_key": "input",
        "data.max_len": workload.context,
        "rollout.max_new_tokens": workload.longest,
        "rollout.batch_size": workload.prompts,
        "rollout.n_samples_per_prompt": workload.samples,
        "rollout.micro_batch_size": workload.micro_batch_samples,
        "train.batch_size": workload.num_samples,
        "train.micro_batch_size": max(1, workload.micro_batch_samples // 2),
        "actor.adam.lr": 1e-6,
        "actor.num_nodes": 1,
        "actor.num_gpus_per_node": 1,
        "vllm.num_engines": 1,
        "vllm.tensor_parallel_size": 1,
        "vllm.gpu_memory_utilization": task.memory,
        "ds.zero_stage": 2,
        "ds.param_dtype": "bf16",
        "ds.attn_implementation": "sdpa",
        "ckpt.output_dir": folder / "upstream",
        "ckpt.path": folder / "upstream_checkpoints",
    }
    switches = ["train.colocate_all", "vllm.enable_sleep", "ds.enable_sleep", "actor.gradient_checkpointing_enable"]
    if workload.has_critic:
        for role in ("critic", "ref", "reward"):
            given |= {f"{role}.num_nodes": 1, f"{role}.num_gpus_per_node": 1}
        given |= {"algo.advantage.estimator": "gae", "algo.kl.init_coef": 0.01, "critic.adam.lr": 1e-6}
        given |= {"critic.model_name_or_path": task.model, "reward.model_name_or_path": folder / "reward_model"}
    else:
        given |= {"algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0}
        given["reward.remote_url"] = folder / "upstream_reward.py"
    pairs = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return [*pairs, *(f"--{name}" for name in switches)]


def read_timings(lines: Iterable[str]) -> Iterable[dict[str, float]]:
    """Yield the timings of each step, in seconds by name."""
    for line in lines:
        if step := STEP.search(line):
            yield {name: float(value) for name, value in TIMING.findall(step[1])}


def version_in(folder: Path) -> str:
    """Return the version that the folder's version.txt states."""
    file = folder / "version.txt"
    return file.read_text().strip() if file.exists() else "from its folder"


if __name__ == "__main__":
    main()
