"""vLLM's worker processes on the other nodes of an engine that spans several.

Such an engine is an `EngineWorker` on its first node and an `EnginePeer` on each other one. A peer starts vLLM's
workers on the devices of its node; they join those of the first node and take their work from there, including new
weights, for which every worker connects to the policy itself. The driver starts both (`cluster/engine_nodes.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from openrlhf.errors import EngineError
from openrlhf.models.load import choose_dtype
from openrlhf.rollout.spec import EngineSpec
from openrlhf.rollout.vllm import engine_arguments, set_environment

CHECK_EVERY = 1.0  # seconds between checks of whether the workers are alive


class EnginePeer:
    """The part of an engine on one of its nodes other than the first."""

    def run(self, work: Callable[[], None]) -> None:
        """Run `run_workers`, which the driver passes as `work`; this call never returns."""
        work()

    def exit(self) -> None:
        os._exit(0)


def run_workers(spec: EngineSpec, device: torch.device) -> None:
    """Run vLLM's workers on this node until one of them ends, and raise an error."""
    set_environment()
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments = engine_arguments(spec, choose_dtype(spec.model.param_dtype, device))
    config = arguments.create_engine_config(usage_context=UsageContext.LLM_CLASS, headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)  # returns when the whole engine has started
    while all(worker.proc.is_alive() for worker in executor.workers):
        time.sleep(CHECK_EVERY)
    raise EngineError("a worker process of vLLM ended")
