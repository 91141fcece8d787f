"""Flags of generation, scoring, chat, serving and merging."""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling"""

    greedy_sampling: bool = flag(False, "always take the likeliest token")
    temperature: float = flag(1.0, "sampling temperature")
    top_p: float = flag(1.0, "sample from the smallest set of tokens with this probability")
    repetition_penalty: float = flag(1.0, "above 1: make tokens that already stand there less likely")
    enable_csft: bool = flag(False, "append --csft_prompt to the prompt (conditional SFT)")
    csft_prompt: str = flag("<rm_score>: 5.00", "what conditional SFT appends")


@dataclass(frozen=True, kw_only=True)
class BatchTaskFlags:
    """Task"""

    eval_task: Literal["generate_vllm", "generate", "rm"] | None = flag(
        None, "generate with vLLM, generate in process, or score with a reward model"
    )
    output_path: str | None = flag(None, "JSONL file that receives the rows")
    best_of_n: int = flag(1, "responses per prompt")
    post_processor: Literal["rs", "csft", "iter_dpo", "null"] | None = flag(
        None, "after scoring: best response per prompt, conditional SFT rows, or DPO pairs"
    )
    reward_template: str | None = flag(None, "csft's template with {input} and {reward}")
    normalize_reward: bool = flag(False, "csft over rewards with mean 0 and deviation 1")
    iter: int | None = flag(None, "take the slice [iter x rollout_batch_size, + rollout_batch_size) of the prompts")
    rollout_batch_size: int = flag(2048, "size of that slice")
    micro_batch_size: int = flag(16, "samples per device and forward")
    prompt_max_len: int = flag(1024, "tokens of a prompt")
    max_new_tokens: int = flag(1024, "tokens of a response")
    tp_size: int | None = flag(None, "devices per vLLM engine; none is all there are, with --vllm_num_engines one")
    vllm_num_engines: int | None = flag(None, "vLLM engines on Ray, for large sets; none is one in each process")
    max_num_seqs: int = flag(256, "sequences that an engine runs at a time")
    enable_prefix_caching: bool = flag(False, "share the cache of common prefixes")
    zero_stage: int = flag(0, "DeepSpeed ZeRO stage, 0 to 3")
    local_rank: int = flag(-1, "set by the launcher")
    seed: int = flag(1234, "seed of every random choice")
    full_determinism: bool = flag(False, "deterministic kernels, slower")


@dataclass(frozen=True, kw_only=True)
class BatchDataFlags:
    """Data"""

    dataset: str | None = flag(None, "comma list of files, folders or hub names; name@dir")
    dataset_probs: str | None = flag(None, "comma list of mixing probabilities; none concatenates")
    dataset_split: str = flag("train", "split of the datasets")
    max_samples: int = flag(100_000_000, "rows taken of each dataset, and again after mixing")
    max_len: int = flag(2048, "tokens per sample when scoring")
    input_key: str = flag("input", "field with the prompt")
    output_key: str = flag("output", "field with the response")


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """Conversation"""

    max_len: int = flag(4096, "tokens of history and reply together")
    ta_prompt: str | None = flag(None, "file whose text starts the history")


@dataclass(frozen=True, kw_only=True)
class ServingFlags:
    """Server"""

    reward_pretrain: str | None = flag(None, "reward model folder or hub name")
    normalize_reward: bool = flag(False, "(reward - mean) / std with the values stored in the reward model")
    max_len: int = flag(2048, "tokens per query; longer ones are cut, or refused with --refuse_long")
    refuse_long: bool = flag(False, "answer 413 to a query of more than --max_len tokens instead of cutting it")
    batch_size: int | None = flag(None, "queries per forward; none is as many as wait and --batch_tokens allows")
    batch_tokens: int | None = flag(
        None, "tokens per forward, padding included; a longer query goes alone; none is 32768 on a GPU, 2048 on CPUs"
    )
    packing_samples: bool = flag(False, "concatenate queries instead of padding them")
    host: str = flag("127.0.0.1", "address to bind; upstream binds 0.0.0.0, which here needs --api_key")
    port: int = flag(5000, "port to bind")
    api_key: str | None = flag(
        None, "key that requests must bring (Authorization: Bearer KEY); better given as OPENRLHF_RM_API_KEY"
    )
    max_request_mb: int = flag(32, "largest request body in MiB")


@dataclass(frozen=True, kw_only=True)
class MergeFlags:
    """Merge"""

    model_path: str | None = flag(None, "base model folder or hub name")
    lora_path: str | None = flag(None, "adapter folder")
    output_path: str | None = flag(None, "folder that receives the merged model")
    is_rm: bool = flag(False, "the base is a reward model (sequence classification)")
