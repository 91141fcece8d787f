"""Log-probs of engine and trainer are compared: a difference is reported, and a large one stops the run."""

import asyncio
from dataclasses import replace

import pytest
import torch

from openrlhf.config.sections.rl import RolloutFlags
from openrlhf.data.collate import Layout
from openrlhf.errors import RolloutError
from openrlhf.rl.proof import PROBE_TOKENS, GapWatch
from openrlhf.rl.samples import Batching
from openrlhf.rl.workers import BatchScores
from openrlhf.types import Completion, Prompt
from tests.samples import make_trajectory

PADDED, PACKED = Layout(packing=False, pad_id=0), Layout(packing=True, pad_id=0)
MOVED = {"actor_lr": 0.1, "actor_grad_norm": 1.0}


class Trainer:
    """A trainer that gives every token a log-prob of -1; with `leaks`, only in the first sequence of a batch."""

    def __init__(self, *, leaks=False):
        self.leaks = leaks
        self.sequences = []

    async def score(self, batches, *, log_probs):
        return BatchScores()

    async def log_probs(self, batches):
        self.sequences += [int(batch.sequence_ids.max()) + 1 for batch in batches]
        return [torch.where(batch.sequence_ids > 0, -2.0 if self.leaks else -1.0, -1.0) for batch in batches]


class Console:
    def __init__(self):
        self.lines = []

    def tell(self, line):
        self.lines.append(line)


def sample(log_prob, version=0, index=0, length=2):
    mask, log_probs = (False, *(True,) * length), (0.0, *(log_prob,) * length)
    ids = (1, *(2,) * length)
    return make_trajectory(Prompt(index, f"prompt {index}", (1,)), ids, mask, log_probs, version=version)


def make_check(trainer=None, layout=PADDED, size=8, **settings):
    limits = {"warn": 0.01, "stop": 0.1} | settings
    return GapWatch(trainer or Trainer(), Batching(layout, size), Console(), **limits)


def run_check(gap, *trajectories, version=0):
    return asyncio.run(gap.compare(trajectories, version, version + 1)).get("rollout/log_prob_difference")


def test_the_difference_is_a_mean_over_sampled_tokens():
    gap = make_check()
    assert run_check(gap, sample(-1.0), sample(-1.06, length=1)) == pytest.approx(0.02)
    assert run_check(gap, sample(-1.0), sample(-1.0)) == 0.0


def test_a_large_difference_is_reported_and_again_when_it_doubles():
    gap = make_check()
    for log_prob in (-1.005, -1.02, -1.03, -1.05):
        run_check(gap, sample(log_prob), sample(log_prob))
    first, second = gap.monitor.lines
    assert "step 1: the log-probs of engine and trainer differ by 0.02 nats" in first
    assert "expected below 0.01" in first
    assert "differ by 0.05" in second


def test_too_large_a_difference_is_an_error_that_names_the_sample():
    with pytest.raises(RolloutError, match=r"differ by 0\.25 nats.*below 0\.01.*prompt 3"):
        run_check(make_check(), sample(-1.0), sample(-1.5, index=3))


def test_a_gap_in_later_turns_alone_is_blamed_on_tokenisation():
    """The trainer sees the same first turn, and another history before the second."""
    mask, log_probs = (False, True, True, False, True, True), (0.0, -1.0, -1.0, 0.0, -1.5, -0.4)
    item = make_trajectory(Prompt(0, "prompt", (1,)), (1, 2, 2, 3, 2, 2), mask, log_probs)
    with pytest.raises(RolloutError, match="Likely cause: tokenisation: first turns agree but later ones do not"):
        run_check(make_check(), item, item)


def test_a_gap_without_a_known_symptom_has_an_unknown_cause():
    """All tokens of the engine are less likely, at any temperature."""
    with pytest.raises(RolloutError, match="Likely cause: unknown"):
        run_check(make_check(), sample(-1.5), sample(-1.5, length=9))


def test_a_difference_of_nan_is_an_error():
    with pytest.raises(RolloutError, match="a log-prob is not a number"):
        run_check(make_check(), sample(float("nan")), sample(-1.0))


def test_samples_of_older_weights_are_not_compared():
    assert run_check(make_check(), sample(-9.0, version=1), version=2) is None


def test_turns_sampled_from_a_truncated_vocabulary_are_not_compared():
    assert run_check(make_check(), replace(sample(-9.0), whole_vocabulary=False)) is None


@pytest.mark.parametrize("layout", [PADDED, PACKED])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_a_leak_between_sequences_of_a_batch_is_detected(layout, count):
    trainer = Trainer(leaks=True)
    with pytest.raises(RolloutError):
        run_check(
            make_check(trainer, layout), *(sample(-1.0, index=number, length=2 + number) for number in range(count))
        )
    assert set(trainer.sequences) == {2}


def test_a_single_fresh_sample_is_scored_together_with_an_older_one():
    trainer = Trainer()
    assert run_check(make_check(trainer), sample(-9.0, version=1), sample(-1.0, version=2), version=2) == 0.0
    assert trainer.sequences == [2]


def test_samples_too_long_to_share_a_micro_batch_are_not_compared():
    lengths = []

    class MeasuringTrainer(Trainer):
        async def log_probs(self, batches):
            lengths.extend(batch.input_ids.numel() for batch in batches)
            return await super().log_probs(batches)

    samples = [sample(-1.0, length=length) for length in (99, 99, 99, 99, 3, 3, 3, 3)]
    run_check(make_check(MeasuringTrainer(), size=1), *samples)
    assert lengths == [8, 8]
    lengths.clear()
    run_check(make_check(MeasuringTrainer(), size=2), *samples)
    assert max(lengths) == 200


class Engine:
    """An engine whose tokens all have the same log-prob and weight version."""

    def __init__(self, log_prob, version, seconds=0.0):
        self.log_prob = log_prob
        self.version = version
        self.seconds = seconds

    async def generate(self, requests):
        await asyncio.sleep(self.seconds)
        rooms = [min(PROBE_TOKENS, 64 - len(request.prompt_token_ids)) for request in requests]
        assert [request.params.max_tokens for request in requests] == rooms
        return [Completion.of((2, 2), (self.log_prob,) * 2, "..", "length", self.version) for _ in requests]


FLAGS = RolloutFlags(max_len=64)
PROMPTS = [Prompt(number, "", (1,) * length) for number, length in enumerate((3, 60, 5))]


def run_probe(gap, engine, version, prompts=PROMPTS):
    asyncio.run(gap.probe(engine, prompts, FLAGS, version))


def test_an_asynchronous_run_probes_the_first_changed_weights():
    gap = make_check(probe_every=0)
    gap.note_update({"actor_lr": 0.0, "actor_grad_norm": 1.0})
    assert not gap.probe_is_due(1)
    gap.note_update(MOVED)
    assert gap.probe_is_due(2)
    with pytest.raises(RolloutError, match=r"step 2: .* differ by 1 "):
        run_probe(gap, Engine(-2.0, version=2), 2)
    run_probe(gap, Engine(-1.0, version=2), 2)
    gap.note_update(MOVED)
    assert not gap.probe_is_due(3)
    assert gap.monitor.lines == []


def test_probes_repeat_at_the_given_interval():
    gap = make_check(probe_every=3)
    assert [version for version in range(1, 10) if gap.probe_is_due(version)] == [3, 6, 9]
    assert not any(make_check(probe_every=None).probe_is_due(version) for version in range(10))


def test_an_inconclusive_probe_says_why(monkeypatch):
    gap = make_check(probe_every=0)
    run_probe(gap, Engine(-1.0, version=4), 4, prompts=[Prompt(0, "", (1,) * 64)])
    monkeypatch.setattr("openrlhf.rl.proof.PROBE_SECONDS", 0.01)
    run_probe(gap, Engine(-1.0, version=5, seconds=60.0), 5)
    without_room, busy = gap.monitor.lines
    assert "step 4" in without_room
    assert "no prompt leaves room" in without_room
    assert "busy" in busy
