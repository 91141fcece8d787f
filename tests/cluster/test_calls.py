"""Which of several failures a run reports, without Ray."""

import asyncio

import pytest
import torch
from ray.exceptions import RayTaskError

from openrlhf.cluster import calls
from openrlhf.cluster.calls import Process, ProcessWatch
from openrlhf.errors import BackendError, DeathError, DeviceMemoryError


async def fail():
    raise BackendError("policy 0: connection reset by peer")


def test_a_death_that_is_noticed_later_explains_the_failure_of_another_process():
    async def scenario():
        watch = ProcessWatch()
        asyncio.get_running_loop().call_later(0.05, watch.death.set_exception, BackendError("policy 1 died"))
        await watch.guard(fail())

    with pytest.raises(BackendError, match="policy 1 died"):
        asyncio.run(scenario())


def test_a_failure_without_a_death_is_reported_unchanged(monkeypatch):
    monkeypatch.setattr(calls, "SECONDS_TO_BLAME", 0.01)

    async def scenario():
        await ProcessWatch().guard(fail())

    with pytest.raises(BackendError, match="connection reset"):
        asyncio.run(scenario())


def test_a_process_that_misses_its_deadline_counts_as_dead():
    async def scenario():
        silent = asyncio.get_running_loop().create_future()
        await Process(None, "engine 0", "here").within(0.05).answer(silent)

    with pytest.raises(DeathError, match=r"engine 0 on here did not answer within 0\.05 seconds"):
        asyncio.run(scenario())


def test_the_death_of_the_called_process_is_not_recoverable():
    async def die():
        raise DeathError("policy 1 died")

    async def scenario():
        await ProcessWatch().guard(die())

    with pytest.raises(BackendError, match="policy 1 died") as caught:
        asyncio.run(scenario())
    assert not isinstance(caught.value, DeathError)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(torch.OutOfMemoryError("CUDA out of memory."), DeviceMemoryError), (RuntimeError("a bug"), BackendError)],
)
def test_a_full_device_in_another_process_has_its_own_error(cause, kind, capsys):
    async def fail_remotely():
        raise RayTaskError("train_policy", "Traceback: line 1", cause)

    with pytest.raises(BackendError, match="policy 0 on here: ") as caught:
        asyncio.run(Process(None, "policy 0", "here").answer(fail_remotely()))
    assert type(caught.value) is kind
    assert "Traceback: line 1" in capsys.readouterr().err  # the traceback of the other process
