"""Description of a generation engine: sections of flags, and the values that a run derives from its other flags.

`rl.engines.engine_spec` and `inference.generate` describe the engines of a run. The description can be pickled, so on
a cluster it travels to the worker process that builds the engine (`rl.engines.make_engine`).
"""

from dataclasses import dataclass

from openrlhf.config.sections.cluster import EngineFlags
from openrlhf.config.sections.model import ServedModelFlags


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What an engine is built from: a vLLM engine if `engines.vllm_num_engines` is set, else a Transformers engine."""

    model: ServedModelFlags
    engines: EngineFlags
    context_length: int  # maximum tokens of prompt and response together
    seed: int = 0
    seeded_requests: bool = False  # a random stream per request: reproducible, but slow in large batches
    max_num_seqs: int | None = None  # sequences that vLLM runs at a time (default: vLLM's choice)
    whole_log_probs: bool = False  # over the whole vocabulary, before temperature, even if sampling is limited
    awaits_weights: bool = True  # generate nothing before the policy's weights have arrived
