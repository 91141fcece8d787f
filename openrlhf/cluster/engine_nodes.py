"""Engines on several nodes: one process per node, which start together and end together.

The first node has the engine itself; the driver calls only that process. The others are its peers (`EnginePeer`), and
each executes one call that ends only when the peer fails. The engine then ends as well, and is replaced as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from openrlhf.cluster.calls import Process
from openrlhf.errors import DeathError, EngineError, OpenRLHFError
from openrlhf.event_loop import mark_retrieved
from openrlhf.monitor import say
from openrlhf.rl.engines import join_engine, load_engine
from openrlhf.rollout.engine_worker import EngineWorker
from openrlhf.rollout.spec import EngineSpan, EngineSpec
from openrlhf.rollout.vllm_peer import EnginePeer

SECONDS_TO_ANSWER = 10.0  # wait for an engine's answer to a ping


async def start_on_nodes(
    process: Process[EngineWorker],
    peers: Sequence[Process[EnginePeer]],
    spec: EngineSpec,
    number: int,
    folder: str,
    port: int,
) -> asyncio.Task[None] | None:
    """Build an engine and its peers; return a task that ends the engine if a peer fails, None if it has no peers.

    `port` is free on the engine's first node, and `folder` is the driver's working folder.
    """
    span = EngineSpan(len(peers) + 1, 0, process.address, port)
    here = replace(spec, span=span) if peers else spec
    build = partial(load_engine, here, number, folder)
    loading = asyncio.ensure_future(process.call(EngineWorker.start, build, spec.awaits_weights))
    parts = [replace(spec, span=replace(span, node=node)) for node in range(1, span.nodes)]
    running = [
        mark_retrieved(asyncio.ensure_future(peer.call(EnginePeer.run, partial(join_engine, part, number, folder))))
        for peer, part in zip(peers, parts, strict=True)
    ]
    await asyncio.wait((loading, *running), return_when=asyncio.FIRST_COMPLETED)
    for ended in (one for one in running if one.done()):
        loading.cancel()
        raise EngineError(f"{process} did not start on all its nodes: {reason(ended)}")
    await loading
    return asyncio.create_task(end_with_peers(process, running)) if running else None


async def end_with_peers(process: Process[EngineWorker], running: Sequence[asyncio.Future[None]]) -> None:
    """Wait until a peer ends, then end the rest of the engine, which might wait for that peer forever."""
    done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    ended_first = False  # if True, the engine's callers report why
    try:
        async with asyncio.timeout(SECONDS_TO_ANSWER):
            await process.within(None).call(EngineWorker.ping)
    except DeathError:
        ended_first = True
    except TimeoutError:
        pass
    if not ended_first:
        say(f"{process} lost one of its processes: {reason(done.pop())}")
    process.kill()


def reason(ended: asyncio.Future[None]) -> str:
    error = ended.exception()
    return error.message if isinstance(error, OpenRLHFError) else str(error)
