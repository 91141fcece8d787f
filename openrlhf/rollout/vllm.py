"""vLLM as an engine in this process: the trainer's own, an engine process that the trainer started, or a Ray actor.

This module builds vLLM and translates between its types and ours:

    Request  ->  VLLMRequest  ->  StepLoop: vLLM's steps on a thread (vllm_loop.py)  ->  Completion

vLLM runs without its own engine process, so it has side effects on its host process:

- it creates torch's default process group, with one member, and destroys it when it is closed;
- on CPU it replaces `torch.set_num_threads`, and everywhere it sets the precision of fp32 matrix products: both are
  restored here;
- it seeds torch's global generators when it starts, and samples from them unless `seeded_requests` is on.

Therefore, build the engine first, then seed and build the trainer.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.config.checks.extras import require
from openrlhf.config.checks.paths import split_revision
from openrlhf.errors import RolloutError
from openrlhf.models.compiler_cache import keep_compiled_code_private
from openrlhf.models.load import choose_dtype
from openrlhf.monitor import say
from openrlhf.rollout.hf import end_tokens
from openrlhf.rollout.spec import EngineSpec
from openrlhf.rollout.vllm_loop import LLMEngine, StepLoop, VLLMRequest, rejections
from openrlhf.types import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from vllm import EngineArgs
    from vllm import SamplingParams as VLLMSamplingParams

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forking a process that has threads may hang
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the host process decides which cores to use
}
CHANGED_VARIABLES = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")  # set by vLLM on CPU; launchers also use the second one
LONGEST_FOLDER = 70  # maximum bytes of the folder: a socket's path has at most 107, of which vLLM appends 37
TORCH = os.path.dirname(torch.__file__)
SEEDS = 1 << 63  # vLLM stores a seed as a signed 64-bit integer


class VLLMEngine(StepLoop):
    """vLLM as a LoadingEngine.

    Its workers iterate over the `weights` given to `load`. With tensor parallelism, each worker is a separate process
    and iterates over its own unpickled copy.
    """

    def __init__(self, spec: EngineSpec, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> None:
        require("vllm", "this engine")
        self.spec = spec
        self.tokenizer = tokenizer
        self.dtype = choose_dtype(spec.model.param_dtype, device)
        set_environment()
        self._ends: frozenset[int] = frozenset()
        try:
            super().__init__(
                spec.engines.engine_timeout, keeps_cache=spec.keeps_cache, reports_experts=spec.reports_experts
            )
        except Exception as error:  # vLLM's errors have no common base class, and every layer below may fail
            raise RolloutError(f"vLLM did not start with {spec.model.pretrain}: {error}") from error

    def _build(self) -> None:
        """Build vLLM on the thread of the step loop, generate one token as a test, and read the model's end tokens."""
        if not can_compile():
            torch._dynamo.config.disable = True  # a setting per thread; all steps run on this one
        with _preserve_host_settings():  # importing vLLM changes them too
            import vllm
            from vllm.inputs import tokens_input

            self._engine = build_engine(self.spec, self.dtype)
            if self.spec.engines.devices_per_engine > 1:  # workers run in separate processes
                self._engine.collective_rpc("end_with_parent")
                self._engine.collective_rpc("make_stage_inputs")
            try:  # one token, so that a model that vLLM loads but cannot run is rejected before anything else starts
                self._engine.add_request("trial", tokens_input([0]), vllm.SamplingParams(max_tokens=1, temperature=0.0))
                while self._engine.has_unfinished_requests():
                    self._engine.step()
            except Exception:  # vLLM may raise anything here, and its processes must end in any case
                self._engine.engine_core.shutdown()
                raise
        generation = self._engine.model_config.try_get_generation_config()
        self._ends = end_tokens(generation.get("eos_token_id"), self.tokenizer)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if not requests:
            return []
        from vllm.inputs import tokens_input

        with rejections():
            translated = [
                VLLMRequest(tokens_input(list(request.prompt_token_ids)), self._sampling(request.params))
                for request in requests
            ]
        made = await self.run_requests(translated)
        texts = self.tokenizer.batch_decode([completion.token_ids.tolist() for completion in made])
        completions: list[Completion] = []
        for request, completion, text in zip(requests, made, texts, strict=True):
            # A greedy token has probability 1 in the sampling distribution, but vLLM reports its log-prob under the
            # model's distribution.
            greedy = request.params.temperature == 0.0
            log_probs = np.zeros_like(completion.log_probs) if greedy else completion.log_probs
            completions.append(replace(completion, text=text, log_probs=log_probs))
        return completions

    def _sampling(self, params: SamplingParams) -> VLLMSamplingParams:
        """Translate our parameters to vLLM's.

        Our `min_tokens` includes the end token; vLLM's does not.
        """
        import vllm
        from vllm.sampling_params import RequestOutputKind

        return vllm.SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            min_tokens=max(0, min(params.min_tokens - 1, params.max_tokens)),
            stop=list(params.stop),
            stop_token_ids=sorted({*self._ends, *params.stop_token_ids}),
            ignore_eos=True,  # the stop tokens above include the end tokens
            seed=params.seed % SEEDS if self.spec.seeded_requests else None,
            logprobs=0,  # only for the sampled token
            flat_logprobs=True,
            detokenize=bool(params.stop),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            include_stop_str_in_output=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    async def sleep(self) -> None:
        if not self.spec.engines.vllm_enable_sleep:
            raise RolloutError("this vLLM engine was started without sleep mode", try_this="--vllm_enable_sleep")
        await super().sleep()


def preload() -> None:
    """Import most of the engine's modules, which takes seconds."""
    require("vllm", "this engine")
    set_environment()
    import_module("openrlhf.rollout.vllm_worker")


def can_compile() -> bool:
    """Return False if torch.compile cannot link here: Inductor passes PyTorch's path to the linker without quotes."""
    return " " not in TORCH


def set_environment() -> None:
    """Set the variables that vLLM reads on import and at startup; only the first overrides the user's value."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if len(gettempdir()) > LONGEST_FOLDER:
        os.environ.setdefault("VLLM_RPC_BASE_PATH", "/tmp")
    keep_compiled_code_private()
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # vLLM logs before it sets this itself
    if find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if not can_compile() and os.environ.get("TORCH_COMPILE_DISABLE") != "1":
        say(f"vLLM runs without torch.compile, which cannot link against PyTorch in a folder with a space: {TORCH}")
        os.environ["TORCH_COMPILE_DISABLE"] = "1"  # inherited by vLLM's other processes; `_build` covers this one
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


@contextmanager
def _preserve_host_settings() -> Iterator[None]:
    """Restore on exit the settings of torch and the environment variables that vLLM changes."""
    set_num_threads, precision = torch.set_num_threads, torch.get_float32_matmul_precision()
    before = {name: os.environ.get(name) for name in CHANGED_VARIABLES}
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_float32_matmul_precision(precision)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def build_engine(spec: EngineSpec, dtype: torch.dtype) -> LLMEngine:
    """Build vLLM's engine with the options that this adapter relies on."""
    from vllm import LLMEngine
    from vllm.usage.usage_lib import UsageContext

    # Same context as vLLM's offline class: with the defaults of a server, fewer requests would run concurrently.
    arguments = engine_arguments(spec, dtype)
    return LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)


def engine_arguments(spec: EngineSpec, dtype: torch.dtype) -> EngineArgs:
    """Translate the description of an engine; an engine on several nodes is described on each of them."""
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    flags, span = spec.engines, spec.span
    divides_experts = flags.vllm_enable_expert_parallel and flags.vllm_tensor_parallel_size > 1
    several_nodes: dict[str, Any] = {}
    if span.nodes > 1:
        several_nodes = {
            "nnodes": span.nodes,
            "node_rank": span.node,
            "master_addr": span.address,
            "master_port": span.port,
        }
    dtype_name: Any = str(dtype).removeprefix("torch.")  # vLLM checks the name
    name, revision = split_revision(str(spec.model.pretrain))
    return EngineArgs(
        model=name,
        revision=revision,
        tokenizer_revision=revision,
        dtype=dtype_name,
        max_model_len=spec.context_length,
        tensor_parallel_size=flags.vllm_tensor_parallel_size,
        pipeline_parallel_size=flags.vllm_pipeline_parallel_size,
        enable_expert_parallel=divides_experts and not current_platform.is_cpu(),  # its kernel on CPU would crash
        gpu_memory_utilization=flags.vllm_gpu_memory_utilization,
        enforce_eager=flags.enforce_eager or not can_compile(),
        enable_prefix_caching=bool(flags.enable_prefix_caching),
        enable_sleep_mode=flags.vllm_enable_sleep and not current_platform.is_cpu(),  # vLLM on CPU can sleep without it
        seed=spec.seed,
        trust_remote_code=spec.model.trust_remote_code,
        max_num_seqs=spec.max_num_seqs,
        distributed_executor_backend="uni" if flags.devices_per_engine == 1 else "mp",
        worker_extension_cls="openrlhf.rollout.vllm_worker.WeightLoading",
        logprobs_mode="raw_logprobs" if spec.whole_log_probs else "processed_logprobs",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        enable_return_routed_experts=spec.reports_experts,
        **several_nodes,
    )
