"""Check that the controller keeps up with a large cluster, and how busy the engines are. Needs neither GPU nor model.

    python benchmarks/scaling.py [--full] [--only controller | engines]

The first table pushes synthetic rollouts through the controller's own functions: filter, queue, experience, batching,
record and log. Workers return ready log-probs. Each stage has the time per token, the bytes that it keeps and the most
that it allocates meanwhile. --full takes 100,000 samples and a step of 131M tokens, which needs 14 GiB.

The second table simulates engines that generate 4,096 samples of 8k tokens on average and 32k at most, event by event:
`barrier` generates one rollout and waits for its longest sample; `stream` starts a sample whenever another one ends,
as long as there are no more than --in_flight rollouts of untrained samples.
"""

import argparse
import asyncio
import heapq
import json
import resource
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import torch

from openrlhf.agents.scores import Scored
from openrlhf.agents.trajectory import join_turn
from openrlhf.config.commands import RLConfig
from openrlhf.config.flags import replace_flags
from openrlhf.data.collate import Layout
from openrlhf.rl.experience import Experience, make_experience
from openrlhf.rl.record import Recorder
from openrlhf.rl.rollouts import Rollout, is_kept
from openrlhf.rl.samples import Batching
from openrlhf.rl.workers import BatchScores
from openrlhf.types import Completion, Prompt, Trajectory

GROUP, PROMPT = 8, 256  # samples of a prompt, and its tokens
MICROSECONDS, BYTES = 0.1, 24  # budget per token
MEAN_TOKENS, MOST_TOKENS, SPREAD = 8192, 32768, 0.9  # of a sample in the simulation; deviation of the log of its length
BATCH = 512  # groups of a rollout in the simulation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the sizes of a large cluster")
    parser.add_argument("--only", choices=("controller", "engines"))
    parser.add_argument("--train_seconds", type=float, default=60.0, help="of a training step")
    parser.add_argument("--sync_seconds", type=float, default=3.0, help="of a weight sync, during which engines pause")
    parser.add_argument("--token_seconds", type=float, default=0.008, help="of a decoding step with one sequence")
    parser.add_argument("--sequence_seconds", type=float, default=0.0001, help="that each further sequence adds to it")
    parser.add_argument("--slots", type=int, default=64, help="sequences that an engine decodes at a time")
    parser.add_argument(
        "--in_flight", type=float, default=4.0, help="rollouts of untrained samples of an asynchronous stream"
    )
    parser.add_argument("--oversampling", type=float, default=1.5, help="the same for a synchronous stream")
    parser.add_argument("--steps", type=int, default=8, help="simulated steps, of which the last half is measured")
    args = parser.parse_args()
    if args.only != "engines":
        sizes = [(100_000, 512), (4096, MOST_TOKENS)] if args.full else [(20_000, 512), (256, MOST_TOKENS)]
        for samples, tokens in sizes:
            asyncio.run(measure_controller(samples, tokens))
    if args.only != "controller":
        simulate(args)


# The controller


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
        recorder = Recorder(Path(folder))
        await stages.measure("record", lambda: recorder.write(1, experience))
        written = sum(file.stat().st_size for file in Path(folder).rglob("*.parquet")) / total
        await stages.measure("log", lambda: json.dumps(experience.metrics) and recorder.first_group(experience))
    within = stages.seconds * 1e6 / total <= MICROSECONDS and stages.kept / total <= BYTES
    print(f"| sum | {1e6 * stages.seconds / total:.4f} | {stages.kept / total:.1f} | |")
    print(f"| budget | {MICROSECONDS} | {BYTES} | {'met' if within else 'exceeded'} |")
    print(f"\nA micro-batch is sent with {sent:.1f} bytes per token; the recorded file has {written:.1f}.")


# The engines


@dataclass
class Engine:
    """An engine that decodes up to `slots` sequences; all of them get a token in each step."""

    running: list[tuple[float, int, int]] = field(default_factory=list)  # heap of (step at the end, number, group)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (tokens, group) without a slot
    steps: float = 0.0  # decoding steps so far
    since: float = 0.0  # time of that count
    event: int = 0  # number of the next event; older ones are void


@dataclass
class Cluster:
    """Engines that generate samples; `now` is the time in seconds, without pauses."""

    count: int
    args: argparse.Namespace
    now: float = 0.0
    paused: float = 0.0
    tokens: int = 0  # generated so far
    events: list[tuple[float, int, int]] = field(default_factory=list)  # heap of (time, event, engine)

    def __post_init__(self) -> None:
        self.engines = [Engine() for _ in range(self.count)]
        self.numbers = count()

    @property
    def time(self) -> float:
        return self.now + self.paused

    def step_seconds(self, sequences: int) -> float:
        return self.args.token_seconds + self.args.sequence_seconds * sequences

    @property
    def most_tokens_per_second(self) -> float:
        return self.count * self.args.slots / self.step_seconds(self.args.slots)

    def start(self, tokens: int, group: int) -> None:
        """Give a sample to the least busy engine."""
        place = min(range(self.count), key=lambda place: self._load(self.engines[place]))
        self._catch_up(self.engines[place])
        self.engines[place].waiting.append((tokens, group))
        self._fill(place)

    def _load(self, engine: Engine) -> int:
        return len(engine.running) + len(engine.waiting)

    def _catch_up(self, engine: Engine) -> None:
        if engine.running:
            engine.steps += (self.now - engine.since) / self.step_seconds(len(engine.running))
        engine.since = self.now

    def _fill(self, place: int) -> None:
        """Start waiting samples in free slots, and schedule the end of the next sample."""
        engine = self.engines[place]
        while engine.waiting and len(engine.running) < self.args.slots:
            tokens, group = engine.waiting.popleft()
            self.tokens += tokens
            heapq.heappush(engine.running, (engine.steps + tokens, next(self.numbers), group))
        if engine.running:
            left = max(0.0, engine.running[0][0] - engine.steps)
            engine.event = next(self.numbers)
            end = self.now + left * self.step_seconds(len(engine.running))
            heapq.heappush(self.events, (end, engine.event, place))

    def next_finished(self, until: float = float("inf")) -> int | None:
        """Advance to the end of the next sample and return its group; None if `until` comes first."""
        while self.events and self.events[0][0] + self.paused <= until:
            end, event, place = heapq.heappop(self.events)
            engine = self.engines[place]
            if event == engine.event:
                self.now = end
                self._catch_up(engine)
                _, _, group = heapq.heappop(engine.running)
                self._fill(place)
                return group
        self.now = max(self.now, until - self.paused)
        return None


class Groups:
    """Starts groups of samples with random lengths, and says which of them are complete and pass the filter."""

    def __init__(self, cluster: Cluster, pass_rate: float, seed: int = 0) -> None:
        self.cluster, self.pass_rate = cluster, pass_rate
        self.random = np.random.default_rng(seed)
        self.left: dict[int, int] = {}  # samples of each group that are not complete
        self.started = 0
        middle = np.log(MEAN_TOKENS) - SPREAD**2 / 2
        for _ in range(20):  # raise the median until the mean of the lengths, cut at the maximum, is right
            drawn = np.random.default_rng(1).lognormal(middle, SPREAD, 200_000).clip(16, MOST_TOKENS)
            middle += np.log(MEAN_TOKENS / drawn.mean())
        self.middle = middle

    def start(self, groups: int) -> None:
        for _ in range(groups):
            lengths = self.random.lognormal(self.middle, SPREAD, GROUP).clip(16, MOST_TOKENS).astype(int)
            self.left[self.started] = GROUP
            for tokens in lengths.tolist():
                self.cluster.start(tokens, self.started)
            self.started += 1

    def note(self, group: int) -> bool | None:
        """Note the end of a sample; return whether its group passes the filter, or None if it is not complete."""
        self.left[group] -= 1
        if self.left[group]:
            return None
        del self.left[group]
        return bool(self.random.random() < self.pass_rate)


def rollouts_with_barrier(groups: Groups) -> Iterator[None]:
    """Generate one rollout after the other; rejected groups are replaced in further rounds."""
    while True:
        accepted = 0
        while accepted < BATCH:
            groups.start(BATCH - accepted)
            while groups.left:
                group = groups.cluster.next_finished()
                assert group is not None
                accepted += bool(groups.note(group))
        yield


def run_barrier(cluster: Cluster, groups: Groups, *, asynchronous: bool) -> Iterator[float]:
    """Yield the time at which each step ends; asynchronously, the rollout before is trained meanwhile."""
    trained = 0.0  # when the trainer is free
    for _ in rollouts_with_barrier(groups):
        if not asynchronous:
            cluster.paused += cluster.args.train_seconds + cluster.args.sync_seconds
            yield cluster.time
            continue
        begun = max(cluster.time, trained)
        cluster.paused += begun - cluster.time + cluster.args.sync_seconds  # one rollout may wait for the trainer
        trained = begun + cluster.args.train_seconds
        yield cluster.time


def run_stream(cluster: Cluster, groups: Groups, *, asynchronous: bool) -> Iterator[float]:
    """Yield the time at which each step ends; a group starts whenever another one is trained or rejected."""
    limit = round(BATCH * (cluster.args.in_flight if asynchronous else cluster.args.oversampling))
    ready = untrained = 0
    ends = float("inf")  # of the current training step
    while True:
        groups.start(limit - untrained)
        untrained = limit
        if ready >= BATCH and ends == float("inf"):
            ready -= BATCH
            if asynchronous:
                ends = cluster.time + cluster.args.train_seconds
            else:
                untrained -= BATCH
                cluster.paused += cluster.args.train_seconds + cluster.args.sync_seconds
                yield cluster.time
                continue
        group = cluster.next_finished(ends)
        if group is None:  # the step has been trained
            untrained -= BATCH
            ends = float("inf")
            cluster.paused += cluster.args.sync_seconds
            yield cluster.time
        elif (passed := groups.note(group)) is not None:
            ready += passed
            untrained -= not passed


def simulate(args: argparse.Namespace) -> None:
    """Print the time of a step and how busy the engines are, for each policy."""
    print(f"\n{BATCH * GROUP:,} samples a step, {MEAN_TOKENS:,} tokens on average; training {args.train_seconds:g} s\n")
    print("| engines | training | pass rate | policy | seconds a step | engines busy |\n|---|---|---|---|---|---|")
    for engines in (64, 256):
        for asynchronous in (False, True):
            for rate in (1.0, 0.5, 0.3):
                for name, run in (("barrier, serial rounds", run_barrier), ("stream", run_stream)):
                    cluster = Cluster(engines, args)
                    steps = run(cluster, Groups(cluster, rate), asynchronous=asynchronous)
                    times = [(next(steps), cluster.tokens) for _ in range(args.steps)]
                    (first, before), (last, after) = times[args.steps // 2 - 1], times[-1]
                    seconds = last - first
                    busy = (after - before) / (seconds * cluster.most_tokens_per_second)
                    kind = "asynchronous" if asynchronous else "synchronous"
                    each = seconds / (args.steps - args.steps // 2)
                    print(f"| {engines} | {kind} | {rate:.0%} | {name} | {each:.0f} | {busy:.0%} |", flush=True)


if __name__ == "__main__":
    main()
