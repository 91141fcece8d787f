"""Flags of generation, scoring, chat, serving and merging."""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE, SEED, Range, flag
from openrlhf.config.sections.data import INPUT_HELP, SourceFlags
from openrlhf.config.sections.training import ZERO_STAGE

PORT = Range("above 0 and at most 65535", lambda value: 0 < value <= 65535)


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling"""

    greedy_sampling: bool = flag(False, "Always choose the most likely token.")
    temperature: float = flag(1.0, "Sampling temperature.", NOT_NEGATIVE, essential=True)
    top_p: float = flag(
        1.0, "Sample from the smallest set of tokens with this total probability.", POSITIVE_SHARE, essential=True
    )
    repetition_penalty: float = flag(1.0, "Values above 1 make tokens that already occurred less likely.", POSITIVE)
    enable_csft: bool = flag(False, "Append --csft_prompt to the prompt (conditional SFT).")
    csft_prompt: str = flag("<rm_score>: 5.00", "Text that --enable_csft appends to the prompt.", needs="enable_csft")


@dataclass(frozen=True, kw_only=True)
class BatchTaskFlags:
    """Task"""

    eval_task: Literal["generate_vllm", "generate", "rm"] | None = flag(
        None,
        "Generate with vLLM, generate with Transformers, or score with a reward model.",
        required="generate",
        essential=True,
    )
    output_path: str | None = flag(None, "JSONL file for the output rows.", required="./out.jsonl", essential=True)
    best_of_n: int = flag(1, "Responses per prompt.", POSITIVE, essential=True)
    post_processor: Literal["rs", "csft", "iter_dpo", "null"] | None = flag(
        None,
        "After scoring, write the best response per prompt (rs), conditional SFT rows (csft) or DPO pairs (iter_dpo).",
        essential=True,
    )
    reward_template: str | None = flag(None, "Prompt template of --post_processor csft, with {input} and {reward}.")
    normalize_reward: bool = flag(
        False, "Scale the rewards of --post_processor csft to mean 0 and standard deviation 1."
    )
    iter: int | None = flag(
        None,
        "Process only one slice: --rollout_batch_size prompts, starting at prompt iter x rollout_batch_size "
        "(default: all prompts).",
        NOT_NEGATIVE,
    )
    rollout_batch_size: int = flag(2048, "Prompts per slice, with --iter.", POSITIVE)
    micro_batch_size: int = flag(16, "Samples per device and forward pass.", POSITIVE, essential=True)
    prompt_max_len: int = flag(1024, "Maximum tokens per prompt.", POSITIVE)
    max_new_tokens: int = flag(1024, "Maximum tokens per response.", POSITIVE, essential=True)
    tp_size: int | None = flag(
        None,
        "Devices per vLLM engine (default: 1 with --vllm_num_engines, else the process's share of the machine's GPUs).",
        POSITIVE,
    )
    vllm_num_engines: int | None = flag(
        None, "Number of vLLM engines to start on Ray (default: one engine per process, without Ray).", POSITIVE
    )
    max_num_seqs: int = flag(256, "Maximum sequences that an engine runs concurrently.", POSITIVE)
    enable_prefix_caching: bool = flag(False, "Reuse the KV cache of common prefixes.")
    zero_stage: int = flag(0, "DeepSpeed ZeRO stage, 0 to 3.", ZERO_STAGE)
    local_rank: int = flag(-1, "Set by the launcher.")
    seed: int = flag(1234, "Random seed.", SEED)
    full_determinism: bool = flag(False, "Use deterministic kernels, which are slower.")


@dataclass(frozen=True, kw_only=True)
class BatchDataFlags(SourceFlags):
    """Data"""

    dataset: str | None = flag(
        None,
        "Comma-separated files, folders or hub names; name@dir selects a subfolder.",
        required="./prompts.jsonl",
        essential=True,
    )
    max_len: int = flag(2048, "Maximum tokens per sample when scoring.", POSITIVE)
    input_key: str = flag("input", INPUT_HELP, essential=True)
    output_key: str = flag("output", "Field with the response.", essential=True)


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """Conversation"""

    max_len: int = flag(4096, "Maximum tokens in the history and the reply together.", POSITIVE, essential=True)
    ta_prompt: str | None = flag(None, "File whose text starts the history.")


@dataclass(frozen=True, kw_only=True)
class ServingFlags:
    """Server"""

    reward_pretrain: str | None = flag(
        None, "Reward model folder or hub name.", required="./reward_model", essential=True
    )
    normalize_reward: bool = flag(
        False, "Return (reward - mean) / std, with the mean and std stored in the reward model.", essential=True
    )
    max_len: int = flag(
        2048,
        "Maximum tokens per query; longer queries are truncated, or rejected with --refuse_long.",
        POSITIVE,
        essential=True,
    )
    refuse_long: bool = flag(
        False, "Reject a query of more than --max_len tokens with status 413 instead of truncating it."
    )
    batch_size: int | None = flag(
        None, "Queries per forward pass (default: as many as --batch_tokens allows).", POSITIVE, essential=True
    )
    batch_tokens: int | None = flag(
        None,
        "Maximum tokens per forward pass, including padding; a longer query runs alone (default: 32768 on a GPU, 2048 "
        "on a CPU).",
        POSITIVE,
    )
    packing_samples: bool = flag(False, "Concatenate queries instead of padding them.")
    host: str = flag(
        "127.0.0.1",
        "Address to bind; any address other than loopback, such as 0.0.0.0, requires --api_key.",
        essential=True,
    )
    port: int = flag(5000, "Port to bind.", PORT, essential=True)
    api_key: str | None = flag(
        None,
        "Key that requests must send (Authorization: Bearer KEY); set OPENRLHF_RM_API_KEY instead to keep it off the "
        "command line.",
        essential=True,
    )
    max_request_mb: int = flag(32, "Maximum size of a request body in MiB.", POSITIVE)
    max_connections: int = flag(
        512,
        "Maximum open connections; above it, the connection that has waited longest for its client is closed.",
        POSITIVE,
    )
    request_timeout: int = flag(
        60, "Seconds within which a client must send its whole request or read its response.", POSITIVE
    )
    stop_timeout: int = flag(30, "Seconds allowed to answer requests in flight after SIGTERM or Ctrl-C.", POSITIVE)


@dataclass(frozen=True, kw_only=True)
class MergeFlags:
    """Merge"""

    model_path: str | None = flag(None, "Base model folder or hub name.", required="./base", essential=True)
    revision: str | None = flag(None, "Commit hash, tag or branch of the base model on its hub.")
    lora_path: str | None = flag(None, "Adapter folder.", required="./adapter", essential=True)
    output_path: str | None = flag(None, "Folder for the merged model.", required="./merged", essential=True)
    is_rm: bool = flag(False, "Merge into a reward model (sequence classification).", essential=True)
