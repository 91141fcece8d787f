"""Description of a generation engine: sections of flags, and values derived from other flags.

`rl.engines.engine_spec` and `inference.generate` describe the engines of a run. The description can be pickled; on a
cluster, it is sent to the worker process that builds the engine (`rl.engines.make_engine`).
"""

from dataclasses import dataclass, replace
from typing import Self

from openrlhf.config.sections.cluster import EngineFlags
from openrlhf.config.sections.model import ServedModelFlags


@dataclass(frozen=True)
class EngineSpan:
    """The part of an engine that one of its nodes holds."""

    nodes: int = 1
    node: int = 0  # number of this node; the engine itself is on node 0
    address: str = ""  # address at which the other nodes, if any, reach node 0
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Description of a vLLM engine if `engines.vllm_num_engines` is set, else of a Transformers engine."""

    model: ServedModelFlags
    engines: EngineFlags
    context_length: int  # maximum tokens of prompt and response together
    seed: int = 0
    seeded_requests: bool = False  # seed each request: reproducible, but slow in large batches
    max_num_seqs: int | None = None  # maximum concurrent sequences in vLLM (default: vLLM's choice)
    whole_log_probs: bool = False  # return log-probs over the whole vocabulary even if sampling is truncated
    keeps_cache: bool = False  # at a weight sync, unfinished requests keep the keys and values of the older weights
    reports_experts: bool = False  # report the experts that a mixture of experts chose for each token
    span: EngineSpan = EngineSpan()
    awaits_weights: bool = True  # do not generate before the policy's weights have been received

    def divided(self, count: int) -> Self:
        """Describe one of `count` engines that share the memory of this one."""
        share = self.engines.vllm_gpu_memory_utilization / count
        return replace(self, engines=replace(self.engines, vllm_gpu_memory_utilization=share))
