"""A reward server under many clients: requests per second, latency, errors, and whether its memory grows.

    python benchmarks/serve_rm.py                                       (a tiny model made on the spot)
    python benchmarks/serve_rm.py --reward_pretrain ./rm --requests 20000 --packing_samples

The server is the command itself in a process of its own; clients are connections of this one, each sending its next
request when the last one was answered. A request is a group of texts of uneven length. Where clients and server share
the cores, what the clients cost is part of the figures. Unknown flags go to the server.
"""

import argparse
import asyncio
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz "


def make_reward_model(folder: str) -> None:
    """Two layers, hidden 64, one token a letter."""
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
    """The server, when it answers."""
    flags = ["--reward_pretrain", folder, "--port", str(port), *more]
    server = subprocess.Popen(
        [sys.executable, "-m", "openrlhf.cli.serve_rm", *flags], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    for line in server.stderr:
        if "answers on" in line:
            return server
    raise SystemExit("the server did not start")


async def client(http: httpx.AsyncClient, url: str, bodies: list[dict[str, list[str]]]) -> list[float]:
    """Seconds of each request; infinite for one that failed. Takes the next body when it has its answer."""
    seconds: list[float] = []
    while bodies:
        body = bodies.pop()
        begin = time.perf_counter()
        try:
            answer = await http.post(url, json=body)
            good = answer.status_code == 200 and len(answer.json()["rewards"]) == len(body["query"])
        except httpx.HTTPError:
            good = False
        seconds.append(time.perf_counter() - begin if good else float("inf"))
    return seconds


async def load(url: str, clients: int, bodies: list[dict[str, list[str]]]) -> tuple[float, list[float]]:
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(limits=limits, timeout=120) as http:
        begin = time.perf_counter()
        seconds = await asyncio.gather(*(client(http, url, bodies) for _ in range(clients)))
        return time.perf_counter() - begin, sorted(value for part in seconds for value in part)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reward_pretrain", default=None)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--queries", type=int, default=4, help="texts per request")
    parser.add_argument("--longest", type=int, default=128, help="characters of the longest text")
    given, more = parser.parse_known_args()
    chance = random.Random(0)

    def body() -> dict[str, list[str]]:
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
        memory = psutil.Process(server.pid).memory_info
        try:
            asyncio.run(load(url, given.clients, [body() for _ in range(10 * given.clients)]))  # warm
            sizes, wall, seconds = [memory().rss], 0.0, list[float]()
            for _ in range(4):  # memory that grows by as much in each quarter is a leak
                took, part = asyncio.run(load(url, given.clients, [body() for _ in range(given.requests // 4)]))
                sizes, wall, seconds = [*sizes, memory().rss], wall + took, sorted([*seconds, *part])
        finally:
            server.terminate()
            code = server.wait()
    errors = sum(value == float("inf") for value in seconds)
    p50, p99 = (1000 * seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.99))
    print(
        f"{given.clients} clients, {len(seconds)} requests of {given.queries} texts of up to {given.longest} characters"
    )
    print(f"{len(seconds) / wall:.0f} requests/s ({given.queries * len(seconds) / wall:.0f} texts/s), {errors} errors")
    print(f"latency p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    print(f"RSS before and after each quarter: {', '.join(str(size >> 20) for size in sizes)} MiB")
    print(f"SIGTERM: exit code {code}")


if __name__ == "__main__":
    main()
