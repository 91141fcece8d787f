"""Generation for batch_inference by several vLLM engines on a Ray cluster."""

from __future__ import annotations

from openrlhf.cluster.placement import EngineSeat, Plan
from openrlhf.cluster.session import connect
from openrlhf.cluster.start import started_on
from openrlhf.inference.generate import AHEAD, Generation, Sink, describe_engine, stream
from openrlhf.monitor import say

RESTARTS = 1  # per engine; its unfinished requests are generated again


async def generate_on_ray(generation: Generation, sink: Sink) -> None:
    """Start the engines, distribute the requests over them and store the answers in this process."""
    task = generation.config.task
    size = task.tp_size or 1
    asked = Plan((), tuple(EngineSeat(number, size, None) for number in range(task.vllm_num_engines or 1)), "vllm")
    spec = describe_engine(generation, size)
    with connect(asked, {}) as cluster:
        async with started_on(cluster) as starting:
            say(f"starting {asked.describe()}")
            engines = await starting.engines(spec, max_restarts=RESTARTS)
            await stream(engines, sink, window=AHEAD * task.max_num_seqs * len(engines.engines))
