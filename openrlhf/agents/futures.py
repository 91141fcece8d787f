"""Concurrent coroutines that end together, for the layers that run many requests at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TypeVar

Result = TypeVar("Result")


async def gather_or_cancel(coroutines: Iterable[Coroutine[object, object, Result]]) -> list[Result]:
    """Run all coroutines and return their results in order; if one fails, cancel the others and wait for them.

    `asyncio.gather` alone would leave the others running.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
