"""A reward server under many clients: requests per second, latency, CPU time, errors, and whether its memory grows.

    python benchmarks/serve_rm.py                                       (builds a tiny model)
    python benchmarks/serve_rm.py --reward_pretrain ./rm --requests 20000 --packing_samples

The server is the command itself, as a process; clients are connections of this process, and each sends its next request
when the last one is answered. A request is a group of texts of uneven length. If clients and server share the cores,
the figures include the cost of the clients, so the CPU time of a request is printed for both sides; on a busy machine
it is more reliable than the clock. Unknown flags go to the server.
"""

import argparse
import asyncio
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz "

Body = dict[str, list[str]]


def make_reward_model(folder: str) -> None:
    """Make a model of two layers with hidden size 64, and a tokenizer with one token per letter."""
    vocabulary = {token: number for number, token in enumerate(["</s>", "<pad>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=1,
        pad_token_id=1,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(folder: str, port: int, more: list[str]) -> subprocess.Popen[str]:
    """Start the server and wait until it answers."""
    flags = ["--reward_pretrain", folder, "--port", str(port), *more]
    server = subprocess.Popen(
        [sys.executable, "-m", "openrlhf.cli.serve_rm", *flags], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    for line in server.stderr:
        if "answers on" in line:
            return server
    raise SystemExit("the server did not start")


async def client(http: aiohttp.ClientSession, url: str, bodies: list[Body]) -> list[float]:
    """Send requests one after the other; return the seconds of each, infinite if it failed."""
    seconds: list[float] = []
    while bodies:
        body = bodies.pop()
        begin = time.perf_counter()
        try:
            async with http.post(url, json=body) as answer:
                good = answer.status == 200 and len((await answer.json())["rewards"]) == len(body["query"])
        except (aiohttp.ClientError, TimeoutError):
            good = False
        seconds.append(time.perf_counter() - begin if good else float("inf"))
    return seconds


@dataclass
class Measured:
    """Time of all requests, and the server's memory before and after each quarter of them."""

    sizes: list[int]
    latencies: list[float] = field(default_factory=list)
    wall: float = 0.0
    server: float = 0.0  # seconds of CPU time
    clients: float = 0.0


async def measure(
    url: str, clients: int, server: psutil.Process, warm: list[Body], parts: list[list[Body]]
) -> Measured:
    """Run all quarters over the same connections, which the warm-up opened."""
    connector = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as http:
        await asyncio.gather(*(client(http, url, warm) for _ in range(clients)))
        found = Measured([server.memory_info().rss])
        for bodies in parts:
            begin = (time.perf_counter(), cpu_seconds(server), time.process_time())
            latencies = await asyncio.gather(*(client(http, url, bodies) for _ in range(clients)))
            found.wall += time.perf_counter() - begin[0]
            found.server += cpu_seconds(server) - begin[1]
            found.clients += time.process_time() - begin[2]
            found.latencies += [value for part in latencies for value in part]
            found.sizes.append(server.memory_info().rss)
    return found


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reward_pretrain", default=None)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--queries", type=int, default=4, help="texts per request")
    parser.add_argument("--longest", type=int, default=128, help="characters of the longest text")
    given, more = parser.parse_known_args()
    chance = random.Random(0)

    def body() -> Body:
        return {
            "query": [
                "".join(chance.choices(LETTERS, k=chance.randint(1, given.longest))) for _ in range(given.queries)
            ]
        }

    with tempfile.TemporaryDirectory() as folder:
        if given.reward_pretrain is None:
            make_reward_model(folder)
        port = free_port()
        url = f"http://127.0.0.1:{port}/get_reward"
        server = start(given.reward_pretrain or str(Path(folder)), port, more)
        warm = [body() for _ in range(10 * given.clients)]
        parts = [[body() for _ in range(given.requests // 4)] for _ in range(4)]
        try:
            found = asyncio.run(measure(url, given.clients, psutil.Process(server.pid), warm, parts))
        finally:
            server.terminate()
            code = server.wait()
    seconds, count = sorted(found.latencies), len(found.latencies)
    errors = sum(value == float("inf") for value in seconds)
    p50, p99 = (1000 * seconds[int(share * (count - 1))] for share in (0.5, 0.99))
    print(f"{given.clients} clients, {count} requests of {given.queries} texts of up to {given.longest} characters")
    print(f"{count / found.wall:.0f} requests/s ({given.queries * count / found.wall:.0f} texts/s), {errors} errors")
    print(f"latency p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    cpu = [1000 * spent / count for spent in (found.server, found.clients)]
    print(f"CPU time of a request: server {cpu[0]:.2f} ms, client {cpu[1]:.2f} ms")
    # equal growth in each quarter means a leak
    print(f"RSS before and after each quarter: {', '.join(str(size >> 20) for size in found.sizes)} MiB")
    print(f"SIGTERM: exit code {code}")


if __name__ == "__main__":
    main()
