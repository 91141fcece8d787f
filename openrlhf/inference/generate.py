"""Generation for batch_inference: answer the prompts of a dataset.

`plan_generation` reads the prompts and numbers the rows; `generate` sends a request for each missing row to an engine
and stores each answer as soon as it is finished. The engine is Transformers or vLLM in this process, or several vLLM
engines on a Ray cluster. Each row has its own seed, which does not depend on the process that generates it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.cluster.placement import EnginePlan, PlacementPlan
from openrlhf.cluster.session import connect
from openrlhf.cluster.starter import open_starter
from openrlhf.config.commands import BatchInferenceConfig
from openrlhf.config.sections.cluster import EngineFlags
from openrlhf.data.answers import INDEX, read_prompts
from openrlhf.data.records import Records
from openrlhf.data.report import Budget
from openrlhf.data.rows import Loaded, announce
from openrlhf.errors import ConfigError
from openrlhf.event_loop import mark_retrieved, run_async
from openrlhf.inference.engine import choose_model_device, open_hf_engine, sampling_params
from openrlhf.inference.parts import OutputParts
from openrlhf.inference.progress import RowProgress
from openrlhf.models.load import known_positions, read_config
from openrlhf.monitor import say
from openrlhf.rl.engines import make_engine
from openrlhf.rl.rollouts import seed_of
from openrlhf.rollout.engine import Engine
from openrlhf.rollout.spec import EngineSpec
from openrlhf.training.preflight import explain_precision
from openrlhf.types import Completion, Prompt, Request

MEMORY_SHARE = 0.9  # fraction of a device's memory for vLLM; vLLM's own default
RESTARTS = 1  # restarts per engine on Ray; unfinished requests are generated again
AHEAD = 2  # requests in flight per concurrent sequence of an engine, so that its queue is never empty


@dataclass(frozen=True)
class Generation:
    """The rows to generate. Row `number` is answer `number % samples` to prompt `number // samples`."""

    prompts: Sequence[Prompt]
    samples: int  # answers per prompt (--best_of_n)
    context: int  # maximum tokens of a prompt and its answer together
    config: BatchInferenceConfig

    def prompt(self, number: int) -> Prompt:
        return self.prompts[number // self.samples]

    def request(self, number: int) -> Request:
        """Build the request for row `number`; its seed does not depend on the process."""
        prompt, task = self.prompt(number), self.config.task
        longest = min(task.max_new_tokens, self.context - len(prompt.input_ids))
        seed = seed_of(task.seed, prompt.index, number % self.samples)
        params = sampling_params(self.config.sampling, max_tokens=longest, seed=seed)
        return Request(prompt.input_ids, params, prefix=prompt.index)


def plan_generation(
    config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, records: Records, first_index: int
) -> Generation:
    """Read the prompts of this run."""
    context = generation_context(config)
    prompts = announce(read_generation_prompts(config, tokenizer, records, first_index, context)).rows
    return Generation(prompts, config.task.best_of_n, context, config)


def read_generation_prompts(
    config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, records: Records, first_index: int, context: int
) -> Loaded[Prompt]:
    """Read prompts, truncated to leave room for at least one token of the answer."""
    task = config.task
    is_models_limit = context < task.prompt_max_len + task.max_new_tokens  # if so, no flag would help
    budget = Budget(min(task.prompt_max_len, context - 1), None if is_models_limit else "--prompt_max_len")
    return read_prompts(records, tokenizer, config, first_index=first_index, budget=budget)


def generation_context(config: BatchInferenceConfig) -> int:
    """Return the maximum tokens of a prompt and its answer together."""
    task = config.task
    # The context is the sum of both flags, limited by the model.
    asked = task.prompt_max_len + task.max_new_tokens
    limit = known_positions(read_config(str(config.model.pretrain), config.model)) or asked
    if asked > limit:
        say(
            f"--prompt_max_len plus --max_new_tokens is {asked} tokens, but the model supports {limit}:"
            " longer answers are cut off"
        )
    return min(asked, limit)


def generate(generation: Generation, parts: OutputParts, tokenizer: PreTrainedTokenizerBase) -> None:
    """Generate the missing rows of this process; write each row when it is finished."""
    numbers, config = parts.missing, generation.config
    if not numbers:
        return
    requests = [generation.request(number) for number in numbers]
    progress = RowProgress("generate", parts)

    def store(place: int, completion: Completion) -> None:
        """Store the answer to `requests[place]`."""
        prompt = generation.prompt(numbers[place])
        parts.write(numbers[place], {"input": prompt.text, "output": completion.text, INDEX: prompt.index})
        progress.count(len(completion.token_ids))

    async def answer(engine: Engine, num_engines: int = 1) -> None:
        """Answer all requests with an engine."""
        progress.restart_clock()
        await stream(engine, requests, store, window=AHEAD * config.task.max_num_seqs * num_engines)

    with progress:
        if config.task.vllm_num_engines:
            run_async(generate_on_ray(generation, answer))
        elif config.task.eval_task == "generate_vllm":
            run_async(generate_with_vllm(generation, tokenizer, answer))
        else:
            model, name = config.model, str(config.model.pretrain)
            device = choose_model_device(model, name, config.task.local_rank)
            engine = open_hf_engine(model, name, tokenizer, device, max_rows=config.task.micro_batch_size)
            progress.restart_clock()
            engine.complete(requests, store)
        tokens, seconds = progress.tokens, progress.seconds
    whose = "" if len(parts.share) == parts.total else " by this process"
    say(f"generated {tokens:,} tokens in {seconds:.2f} s{whose}, {tokens / seconds:,.0f} tokens/s")


async def generate_with_vllm(
    generation: Generation, tokenizer: PreTrainedTokenizerBase, answer: Callable[[Engine], Awaitable[None]]
) -> None:
    """Generate with one vLLM engine in this process, on the GPUs of this process or on the CPU."""
    config = generation.config
    devices = take_devices(config.task.tp_size) if config.model.device != "cpu" else 0
    device = torch.device("cuda" if devices else "cpu")
    explain_precision(config.model.param_dtype, device)
    engine = make_engine(describe_engine(generation, max(1, devices)), tokenizer, device)
    try:
        await answer(engine)
    finally:
        await engine.close()


async def generate_on_ray(generation: Generation, answer: Callable[[Engine, int], Awaitable[None]]) -> None:
    """Start vLLM engines on a Ray cluster, distribute the requests over them and store the answers in this process."""
    task = generation.config.task
    size = task.tp_size or 1
    asked = PlacementPlan((), tuple(EnginePlan(number, size, None) for number in range(task.vllm_num_engines or 1)))
    spec = describe_engine(generation, size)
    with connect(asked, {}) as cluster:
        async with open_starter(cluster) as starter:
            say(f"starting {asked.describe()}")
            engines = await starter.start_engines(spec, max_restarts=RESTARTS)
            await answer(engines, len(engines.engines))


async def stream(
    engine: Engine, requests: Iterable[Request], store: Callable[[int, Completion], None], *, window: int
) -> None:
    """Send all requests to the engine, at most `window` at a time, and store each answer as it arrives.

    If an engine fails, all its current requests usually fail; only the first error is raised.
    """
    running: dict[asyncio.Future[list[Completion]], int] = {}
    waiting = iter(enumerate(requests))
    while True:
        for place, request in waiting:
            running[mark_retrieved(asyncio.ensure_future(engine.generate([request])))] = place
            if len(running) >= window:
                break
        if not running:
            return
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            store(running.pop(task), task.result()[0])


def describe_engine(generation: Generation, devices: int) -> EngineSpec:
    """Return the description of a vLLM engine on `devices` devices."""
    task = generation.config.task
    return EngineSpec(
        model=generation.config.model,
        engines=EngineFlags(
            vllm_num_engines=task.vllm_num_engines or 1,
            vllm_tensor_parallel_size=devices,
            vllm_gpu_memory_utilization=MEMORY_SHARE,
            enforce_eager=not torch.cuda.is_available(),  # on a CPU, compilation takes more time than it saves
            enable_prefix_caching=task.enable_prefix_caching,
        ),
        context_length=generation.context,
        seed=task.seed + int(os.environ.get("RANK", "0")),
        seeded_requests=task.full_determinism,
        max_num_seqs=task.max_num_seqs,
        awaits_weights=False,
    )


def take_devices(asked: int | None) -> int:
    """Restrict CUDA_VISIBLE_DEVICES to this process's GPUs and return their number.

    vLLM always uses the first visible GPUs, so a process must not see the GPUs of other processes on the machine.
    """
    count = torch.cuda.device_count()  # does not initialise CUDA, so CUDA_VISIBLE_DEVICES can still be changed
    if not count:
        return 0
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(number) for number in range(count)]
    # Number of processes on this machine, as set by torchrun or deepspeed.
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    own = own_devices(visible, asked, int(os.environ.get("LOCAL_RANK", "0")), neighbours)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return len(own)


def own_devices(visible: Sequence[str], asked: int | None, local_rank: int, neighbours: int) -> list[str]:
    """Return the devices of one process on a machine (default: an equal share of the visible devices)."""
    count = asked or max(1, len(visible) // neighbours)
    own = list(visible[local_rank * count : (local_rank + 1) * count])
    if len(own) < count:
        raise ConfigError(
            f"too few GPUs are visible: expected {neighbours * count}, --tp_size {count} for each process on this"
            f" machine ({neighbours}), got {len(visible)}",
            try_this=f"--tp_size {max(1, len(visible) // neighbours)}, or fewer processes",
        )
    return own
