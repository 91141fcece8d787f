"""Reward calls per second: a judge that takes seconds to answer, and a function that answers immediately.

    python benchmarks/rewards.py
    python benchmarks/rewards.py --calls 512 --seconds 5 --processes 8

`async` is an `async def` reward_func with the default of 64 concurrent calls in each process, `threads` a plain one
with --reward_concurrency 64, and `plain` a plain one, which runs one call at a time in each process. The plain judge
gets one call per process, because it would take minutes otherwise. `overhead` measures calls that return immediately.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from openrlhf.agents.build import limits_of
from openrlhf.agents.sandbox.messages import RewardInput, WorkerSpec
from openrlhf.agents.sandbox.pool import Pool
from openrlhf.config.sections.rl import RewardFlags

SOURCES = {
    "async": "import asyncio\nasync def reward_func(queries, prompts, labels):\n    await asyncio.sleep({seconds})\n",
    "threads": "import time\ndef reward_func(queries, prompts, labels):\n    time.sleep({seconds})\n",
    "plain": "import time\ndef reward_func(queries, prompts, labels):\n    time.sleep({seconds})\n",
}
GROUP = RewardInput(["1+1=2"] * 8, ["1+1="] * 8, ["2"] * 8, seed=0)


def measure(kind: str, calls: int, seconds: float, processes: int) -> None:
    """Print the time of a number of calls, all of which start together."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "judge.py"
        file.write_text(SOURCES[kind].format(seconds=seconds) + "    return [1.0] * len(queries)\n")
        spec = WorkerSpec(str(file), "reward", concurrency=64 if kind == "threads" else None)
        pool = Pool(spec, limits_of(RewardFlags(remote_rm_url=str(file), reward_processes=processes)))
        pool.start()
        took = asyncio.run(run_calls(pool, calls))
    name = f"{kind}, {seconds:g} s a call" if seconds else f"{kind}, overhead"
    print(f"{name:24} {processes:3} processes {calls:6} calls {took:8.2f} s {calls / took:8.1f} calls/s", flush=True)


async def run_calls(pool: Pool, calls: int) -> float:
    try:
        began = time.perf_counter()
        await asyncio.gather(*(pool.call(GROUP, retries=0) for _ in range(calls)))
        return time.perf_counter() - began
    finally:
        await pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds that the judge takes for a call")
    parser.add_argument("--processes", type=int, default=8, help="--reward_processes")
    args = parser.parse_args()
    measure("async", args.calls, args.seconds, args.processes)
    measure("threads", args.calls, args.seconds, args.processes)
    measure("plain", args.processes, args.seconds, args.processes)
    measure("async", args.calls, 0, args.processes)
    measure("plain", args.calls, 0, args.processes)


if __name__ == "__main__":
    main()
