"""Tests of `openrlhf.subprocesses` with a real child process that sends back every frame it reads."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable

import pytest

from openrlhf.subprocesses import describe_exit, frame, kill_group, read_frames, send_signal, start_python

ECHO = """
import asyncio, socket
from openrlhf.subprocesses import frame, read_frames

async def main():
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=0))
    async for data in read_frames(reader):
        writer.write(frame(data))
    raise SystemExit(3)

asyncio.run(main())
"""
Use = Callable[[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


def with_child(use: Use) -> str:
    """Start the child, use it, close the connection, and return how the child ended."""

    async def run() -> str:
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"exec({ECHO!r})"
            process = await start_python(code, environment=dict(os.environ), stdin=theirs.fileno())
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        await use(process, reader, writer)
        writer.close()
        return describe_exit(await process.wait())

    return asyncio.run(run())


def test_frames_keep_their_bounds_and_order():
    sent = [b"", b"one", bytes(200_000), b"\x00\xff"]

    async def use(process, reader, writer):
        writer.writelines(map(frame, sent))
        frames = read_frames(reader)
        assert [await anext(frames) for _ in sent] == sent

    assert with_child(use) == "exit code 3"


@pytest.mark.parametrize("end", [kill_group, lambda process: send_signal(process, signal.SIGKILL)])
def test_a_killed_process_closes_its_stream(end):
    async def use(process, reader, writer):
        end(process)
        assert [data async for data in read_frames(reader)] == []
        await process.wait()
        end(process)  # it is gone already

    assert with_child(use) == "killed by SIGKILL"


def test_a_frame_that_is_cut_short_is_the_end_of_the_stream():
    async def read() -> list[bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(frame(b"whole") + frame(b"cut short")[:-1])
        reader.feed_eof()
        return [data async for data in read_frames(reader)]

    assert asyncio.run(read()) == [b"whole"]


def test_signals_without_a_name_are_numbered():
    assert describe_exit(-99) == "killed by signal 99"
