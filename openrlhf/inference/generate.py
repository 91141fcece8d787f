"""Generation for batch_inference: answer the prompts of a dataset.

The engine is Transformers or vLLM in this process, or several vLLM engines on a Ray cluster (`ray.generate`). Each row
has its own seed, so its random stream does not depend on the process that generates it. `Sink` stores each answer as
soon as it is finished.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.agents.sandbox.loop_thread import heard
from openrlhf.config.commands import BatchInferenceConfig
from openrlhf.config.sections.cluster import EngineFlags
from openrlhf.config.sections.inference import SamplingFlags
from openrlhf.data.answers import INDEX, one_slice, waiting_prompts
from openrlhf.data.records import Records
from openrlhf.errors import ConfigError
from openrlhf.inference.parts import Parts
from openrlhf.models.forward import Network
from openrlhf.models.load import known_positions, load_causal_lm, read_config
from openrlhf.monitor import say
from openrlhf.rl.engines import make_engine
from openrlhf.rl.rollouts import seed_of
from openrlhf.rollout.hf import HFEngine
from openrlhf.rollout.spec import EngineSpec
from openrlhf.training.device import choose_device, explain_precision
from openrlhf.training.explain import explain_experts
from openrlhf.training.progress import Progress
from openrlhf.types import Completion, Prompt, Request, SamplingParams

if TYPE_CHECKING:
    from openrlhf.rollout.engine import Engine

NEIGHBOURS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # number of processes on a machine, set by torchrun and deepspeed
MEMORY_SHARE = 0.9  # of a device's memory for vLLM, its own default
AHEAD = 2  # requests at an engine per request that it can run at the same time, so that its queue is never empty


@dataclass(frozen=True)
class Generation:
    """Work of a generation run: its prompts and config; `context` limits prompt and answer together, in tokens.

    Row `number` is answer `number % samples` to prompt `number // samples`.
    """

    prompts: Sequence[Prompt]
    context: int
    config: BatchInferenceConfig

    @property
    def samples(self) -> int:
        return self.config.task.best_of_n

    @property
    def num_rows(self) -> int:
        return len(self.prompts) * self.samples

    def prompt(self, number: int) -> Prompt:
        return self.prompts[number // self.samples]

    def request(self, number: int) -> Request:
        """Build the request for row `number`; its seed is the same in whichever process generates it."""
        prompt, task = self.prompt(number), self.config.task
        longest = min(task.max_new_tokens, self.context - len(prompt.input_ids))
        seed = seed_of(task.seed, prompt.index, number % self.samples)
        params = sampling_params(self.config.sampling, max_tokens=longest, seed=seed)
        return Request(prompt.input_ids, params, prefix=prompt.index)

    def row(self, number: int, completion: Completion) -> dict[str, object]:
        """Format the answer as a row of the output file."""
        prompt = self.prompt(number)
        return {"input": prompt.text, "output": completion.text, INDEX: prompt.index}


def sampling_params(flags: SamplingFlags, *, max_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if flags.greedy_sampling else flags.temperature,
        top_p=flags.top_p,
        repetition_penalty=flags.repetition_penalty,
        seed=seed,
    )


def plan_generation(config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, records: Records) -> Generation:
    """Read the prompts of this run, truncated so that at least one token of an answer fits after each."""
    task = config.task
    chosen, first = one_slice(records, task.iter, task.rollout_batch_size)
    context = context_length(config)
    prompts = waiting_prompts(
        chosen,
        tokenizer,
        config.data.input_key,
        config.template,
        first_index=first,
        budget=min(task.prompt_max_len, context - 1),
        condition=config.sampling.csft_prompt if config.sampling.enable_csft else None,
    )
    return Generation(prompts, context, config)


def context_length(config: BatchInferenceConfig) -> int:
    """Return the tokens allowed for prompt and answer together: the sum of the flags, capped by the model's limit."""
    asked = config.task.prompt_max_len + config.task.max_new_tokens
    reach = known_positions(read_config(str(config.model.pretrain), config.model)) or asked
    if asked > reach:
        say(
            f"--prompt_max_len and --max_new_tokens are {asked} tokens together, but the model reaches {reach}:"
            " an answer ends there"
        )
    return min(asked, reach)


class Sink:
    """Receiver of finished answers: it writes each row to its file and advances the progress bar."""

    def __init__(self, generation: Generation, parts: Parts, progress: Progress) -> None:
        self.generation, self.parts, self.progress = generation, parts, progress
        self.numbers = parts.missing
        self.requests = [generation.request(number) for number in self.numbers]

    def begin(self) -> None:
        """Start measuring speed; call it when the engine is ready."""
        self.progress.begin()

    def finish(self, place: int, completion: Completion) -> None:
        """Store the answer to `requests[place]`."""
        number = self.numbers[place]
        self.parts.write(number, self.generation.row(number, completion))
        self.progress.advance(tokens=len(completion.token_ids))


def generate(generation: Generation, parts: Parts, tokenizer: PreTrainedTokenizerBase) -> None:
    """Generate the missing rows of this process's share."""
    if not parts.missing:
        return
    with Progress("generate", total=len(parts.share), done=len(parts.share) - len(parts.missing)) as progress:
        sink = Sink(generation, parts, progress)
        if generation.config.task.vllm_num_engines:
            from openrlhf.inference.ray_generate import generate_on_ray

            asyncio.run(generate_on_ray(generation, sink))
        elif generation.config.task.eval_task == "generate_vllm":
            asyncio.run(generate_with_vllm(generation, tokenizer, sink))
        else:
            engine = open_hf_engine(generation.config, tokenizer)
            sink.begin()
            engine.complete(sink.requests, sink.finish)
        tokens, seconds = progress.tokens, progress.seconds
    whose = "" if len(parts.share) == parts.total else " by this process"
    say(f"generated {tokens:,} tokens in {seconds:.2f} s{whose}, {tokens / seconds:,.0f} tokens/s")


def open_hf_engine(config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase) -> HFEngine:
    """Load the model onto this process's device and return a Transformers engine for it."""
    device = choose_device(config.model.device, config.task.local_rank)
    explain_precision(config.model.param_dtype, device)
    explain_experts(config.model, str(config.model.pretrain))
    model = load_causal_lm(str(config.model.pretrain), config.model, device=device, packing=False)
    network = Network(model, self_test=not config.model.skip_self_test).to(device)
    return HFEngine(network, tokenizer, max_rows=config.task.micro_batch_size).prepare()


async def generate_with_vllm(generation: Generation, tokenizer: PreTrainedTokenizerBase, sink: Sink) -> None:
    """Generate with one vLLM engine in this process, on its share of the machine's GPUs or on the CPU."""
    config = generation.config
    devices = take_devices(config.task.tp_size) if config.model.device != "cpu" else 0
    device = torch.device("cuda" if devices else "cpu")
    explain_precision(config.model.param_dtype, device)
    engine = make_engine(describe_engine(generation, max(1, devices)), tokenizer, device)
    try:
        await stream(engine, sink, window=AHEAD * config.task.max_num_seqs)
    finally:
        await engine.close()


async def stream(engine: Engine, sink: Sink, *, window: int) -> None:
    """Send all requests to the engine, at most `window` at a time, and store each answer as it arrives.

    A failing engine usually fails all its current requests: only the first error is raised, the others are ignored.
    """
    sink.begin()
    running: dict[asyncio.Future[list[Completion]], int] = {}
    waiting = iter(enumerate(sink.requests))
    while True:
        for place, request in waiting:
            running[heard(asyncio.ensure_future(engine.generate([request])))] = place
            if len(running) >= window:
                break
        if not running:
            return
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            sink.finish(running.pop(task), task.result()[0])


def describe_engine(generation: Generation, devices: int) -> EngineSpec:
    """Return the description of a vLLM engine on `devices` devices."""
    task = generation.config.task
    return EngineSpec(
        model=generation.config.model,
        engines=EngineFlags(
            vllm_num_engines=task.vllm_num_engines or 1,
            vllm_tensor_parallel_size=devices,
            vllm_gpu_memory_utilization=MEMORY_SHARE,
            enforce_eager=not torch.cuda.is_available(),  # without a GPU, compiling takes longer than it saves
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

    vLLM always uses the first visible GPUs, so processes on one machine must not see each other's.
    """
    count = torch.cuda.device_count()  # does not initialise CUDA, so CUDA_VISIBLE_DEVICES can still be changed
    if not count:
        return 0
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(number) for number in range(count)]
    neighbours = next((int(os.environ[name]) for name in NEIGHBOURS if name in os.environ), 1)
    own = own_devices(visible, asked, int(os.environ.get("LOCAL_RANK", "0")), neighbours)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return len(own)


def own_devices(visible: Sequence[str], asked: int | None, local_rank: int, neighbours: int) -> list[str]:
    """Return the devices of one of several processes on a machine; the default is an equal share of all."""
    count = asked or max(1, len(visible) // neighbours)
    own = list(visible[local_rank * count : (local_rank + 1) * count])
    if len(own) < count:
        raise ConfigError(
            f"{neighbours} processes with {count} GPUs each (--tp_size) need {neighbours * count}, but"
            f" {len(visible)} are visible",
            try_this=f"--tp_size {max(1, len(visible) // neighbours)}, or fewer processes",
        )
    return own
