"""Simulate engines that generate the samples of an RL run, event by event; `scaling.py` prints the tables.

`barrier` generates one rollout and waits for its longest sample; groups that a filter rejects are replaced in further
rounds. `stream` starts a group whenever another one is trained or rejected, as long as there are not too many untrained
ones. An engine gives each of its sequences a token in each step; the more sequences, the longer the step.
"""

import argparse
import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

BATCH, GROUP = 512, 8  # groups of a rollout, and samples of a group
MEAN_TOKENS, MOST_TOKENS, SPREAD = 8192, 32768, 0.9  # tokens of a sample; deviation of their logarithm


@dataclass
class Engine:
    """An engine that decodes up to `slots` sequences; all of them get a token in each step."""

    running: list[tuple[float, int, int]] = field(default_factory=list)  # heap of (step at the end, number, group)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (tokens, group) without a slot
    steps: float = 0.0  # decoding steps so far
    since: float = 0.0  # time at which `steps` was reached
    event: int = 0  # number of the next event; older ones are void


@dataclass
class Cluster:
    """Engines that generate samples; `now` is the time in seconds, without pauses."""

    count: int
    args: argparse.Namespace
    now: float = 0.0
    paused: float = 0.0
    tokens: int = 0  # tokens generated so far
    events: list[tuple[float, int, int]] = field(default_factory=list)  # heap of (time, event, engine)

    def __post_init__(self) -> None:
        self.engines = [Engine() for _ in range(self.count)]
        self.numbers = count()
        self.loads = np.zeros(self.count, np.int64)  # samples of each engine, running and waiting

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
        place = int(self.loads.argmin())
        self.loads[place] += 1
        self._catch_up(self.engines[place])
        self.engines[place].waiting.append((tokens, group))
        self._fill(place)

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
                self.loads[place] -= 1
                self._fill(place)
                return group
        self.now = max(self.now, until - self.paused)
        return None


class Groups:
    """Starts groups of samples with random lengths, and determines which of them are complete and pass the filter."""

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
    """Yield the time at which each step ends; asynchronously, the trainer works on the previous rollout."""
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
    ends = float("inf")  # end of the current training step
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
    titles = ("engines", "training", "pass rate", "policy", "seconds a step", "engines busy", "busy at most")
    print(f"| {' | '.join(titles)} |\n" + "|---" * len(titles) + "|")
    for engines in args.engines:
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
                    most = busy_at_most(cluster, rate, asynchronous=asynchronous)
                    row = f"{engines} | {kind} | {rate:.0%} | {name} | {each:.0f} | {busy:.0%} | {most:.0%}"
                    print(f"| {row} |", flush=True)


def busy_at_most(cluster: Cluster, pass_rate: float, *, asynchronous: bool) -> float:
    """Return how busy engines could be if they waited only for the trainer.

    Asynchronously, a step takes as long as generation with full engines, or as training, whichever is longer.
    """
    args = cluster.args
    generation = BATCH * GROUP * MEAN_TOKENS / pass_rate / cluster.most_tokens_per_second
    longest = max(generation, args.train_seconds) if asynchronous else generation + args.train_seconds
    return generation / (longest + args.sync_seconds)
