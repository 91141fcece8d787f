"""Check that the controller keeps up with a large cluster, and how busy the engines are. Needs neither GPU nor model.

    python benchmarks/scaling.py [--full] [--only controller | engines]

The first table pushes synthetic rollouts through the controller's own functions: filter, queue, experience, batching,
record and log. Workers return ready log-probs. For each stage, it shows the time per token, the bytes kept and the peak
bytes allocated. --full takes 100,000 samples and a step of 131M tokens, which needs about 8 GiB.

The second table simulates engines that generate 4,096 samples of 8k tokens on average and 32k at most, event by event:
`barrier` generates one rollout and waits for its longest sample; `stream` starts a sample whenever another one ends, up
to --in_flight rollouts of untrained samples.
"""

import argparse
import asyncio
import gc
import json
import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from simulated_engines import GROUP, MOST_TOKENS, simulate

from openrlhf.agents.scores import Scored
from openrlhf.agents.trajectory import join_turn
from openrlhf.config.commands import RLConfig
from openrlhf.config.flags import replace_flags
from openrlhf.data.collate import Layout
from openrlhf.rl.experience import Experience, make_experience
from openrlhf.rl.record import Recorder
from openrlhf.rl.rollouts import Rollout, is_kept
from openrlhf.rl.sample_files import write_samples
from openrlhf.rl.samples import Batching
from openrlhf.rl.workers import BatchScores
from openrlhf.types import Completion, Prompt, Trajectory

PROMPT = 256  # tokens
MICROSECONDS, BYTES = 0.1, 24  # budget per token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="use the sizes of a large cluster")
    parser.add_argument("--only", choices=("controller", "engines"))
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 256], help="engines to simulate")
    parser.add_argument("--train_seconds", type=float, default=60.0, help="seconds of a training step")
    parser.add_argument(
        "--sync_seconds", type=float, default=3.0, help="seconds of a weight sync, during which engines pause"
    )
    parser.add_argument(
        "--token_seconds", type=float, default=0.008, help="seconds of a decoding step with one sequence"
    )
    parser.add_argument(
        "--sequence_seconds", type=float, default=0.0001, help="seconds that each further sequence adds to it"
    )
    parser.add_argument("--slots", type=int, default=64, help="maximum sequences that an engine decodes together")
    parser.add_argument(
        "--in_flight", type=float, default=4.0, help="rollouts of untrained samples of an asynchronous stream"
    )
    parser.add_argument("--oversampling", type=float, default=1.5, help="the same for a synchronous stream")
    parser.add_argument("--steps", type=int, default=6, help="simulated steps, of which the last half is measured")
    args = parser.parse_args()
    if args.only != "engines":
        sizes = [(100_000, 512), (4096, MOST_TOKENS)] if args.full else [(20_000, 512), (256, MOST_TOKENS)]
        for samples, tokens in sizes:
            asyncio.run(measure_controller(samples, tokens))
    if args.only != "controller":
        simulate(args)


class ReadyWorkers:
    """Workers whose policy and reference have scored everything already."""

    async def score(self, batches: Sequence, *, log_probs: bool) -> BatchScores:
        ready = torch.full((1, max(batch.input_ids.shape[1] for batch in batches)), -1.0)
        found = [ready[:, : batch.input_ids.shape[1]] for batch in batches]
        return BatchScores(found if log_probs else None, found)


def make_samples(samples: int, tokens: int) -> list[Trajectory]:
    """Return groups of samples of the same length, with 0 or 1 as reward."""
    random = np.random.default_rng(0)
    items = []
    for number in range(samples):
        if number % GROUP == 0:
            prompt = Prompt(number // GROUP, "a prompt", tuple(random.integers(0, 50_000, PROMPT).tolist()))
        length = tokens - PROMPT
        ids, log_probs = random.integers(0, 50_000, length, np.int32), -random.random(length, np.float32)
        made = Completion(ids, log_probs, "", "stop", 3, np.full(length, 3, np.int32))
        reward = float(number % 2)
        items.append(join_turn(prompt, made, tokens, Scored(reward, reward)))
    return items


class Stages:
    """Measures stages and prints a line for each."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.seconds = self.kept = 0.0

    async def measure(self, name: str, work: Callable, size_of: Callable = lambda made: 0):
        """Run one stage, in a thread if it is not a coroutine."""
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, began = resident(), time.process_time()
        made = await work() if asyncio.iscoroutinefunction(work) else await asyncio.to_thread(work)
        seconds, peak = time.process_time() - began, peak_resident() - before
        kept = size_of(made)
        self.seconds, self.kept = self.seconds + seconds, self.kept + kept
        print(f"| {name} | {1e6 * seconds / self.tokens:.4f} | {kept / self.tokens:.1f} | {peak / self.tokens:.1f} |")
        return made


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def bytes_in(owner: object) -> int:
    """Return the bytes of the arrays and tensors of an object, each counted once."""
    values = {id(value): value for value in vars(owner).values() if isinstance(value, np.ndarray | torch.Tensor)}
    return sum(value.nbytes for value in values.values())


async def measure_controller(samples: int, tokens: int) -> None:
    """Push a rollout through the stages of the controller."""
    batch = {"rollout_batch_size": samples // GROUP, "n_samples_per_prompt": GROUP, "train_batch_size": samples}
    grpo = {"advantage_estimator": "group_norm", "use_kl_loss": True, "dynamic_filtering": True}
    config = replace_flags(RLConfig(), **batch, **grpo)
    layout, budget = Layout(packing=True, pad_id=0), 2 * MOST_TOKENS
    batching = Batching(layout, 1, token_budget=budget, ranks=8, sharing_limit=MOST_TOKENS)
    items = make_samples(samples, tokens)
    total = samples * tokens
    print(f"\n{samples:,} samples, {total / 1e6:.0f}M tokens, {torch.get_num_threads()} threads\n")
    print("| stage | us/token | bytes/token kept | bytes/token at most |\n|---|---|---|---|")
    stages = Stages(total)
    gc.collect()  # making the samples is not a stage, nor is looking for garbage among them
    held = sum(bytes_in(item) for item in items)

    def filter_groups() -> list[Trajectory]:
        groups = [items[place : place + GROUP] for place in range(0, samples, GROUP)]
        return [item for group in groups if is_kept(group, config.rollout) for item in group]

    def pass_queue() -> Rollout:
        queue = deque([Rollout(0, 3, kept, 0, samples)])
        return queue.popleft()

    async def compute() -> Experience:
        return await make_experience(rollout.trajectories, ReadyWorkers(), batching, config, 0.0)

    kept = await stages.measure("filter", filter_groups, lambda made: held)
    rollout = await stages.measure("queue", pass_queue)
    experience = await stages.measure("experience", compute, lambda made: bytes_in(made) + bytes_in(made.tokens))
    batches = await stages.measure(
        "batching", lambda: experience.micro_batches(range(samples), batching), lambda made: 0
    )
    sent = sum(bytes_in(batch) + (bytes_in(batch.prefixes) if batch.prefixes else 0) for batch in batches) / total
    del batches
    with tempfile.TemporaryDirectory() as folder:
        write_samples(Path(folder) / "first.parquet", items[:1], {})  # imports what it needs
        recorder = Recorder(Path(folder))
        await stages.measure("record", lambda: recorder.write(1, experience))
        written = sum(file.stat().st_size for file in Path(folder).rglob("step_*.parquet")) / total
        await stages.measure("log", lambda: json.dumps(experience.metrics) and recorder.first_group(experience))
    within = stages.seconds * 1e6 / total <= MICROSECONDS and stages.kept / total <= BYTES
    print(f"| sum | {1e6 * stages.seconds / total:.4f} | {stages.kept / total:.1f} | |")
    print(f"| budget | {MICROSECONDS} | {BYTES} | {'met' if within else 'exceeded'} |")
    print(f"\nA micro-batch is sent with {sent:.1f} bytes per token; the recorded file has {written:.1f}.")


if __name__ == "__main__":
    main()
