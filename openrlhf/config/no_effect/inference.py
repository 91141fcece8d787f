"""Flags of generation, scoring, chat, export and the run viewer that have no effect in some runs; see `lines`."""

from collections.abc import Callable

from openrlhf.config.commands import BatchInferenceConfig, ChatConfig, ExportConfig, ViewConfig
from openrlhf.config.no_effect.lines import always, rows


def is_task(*names: str) -> Callable[[BatchInferenceConfig], bool]:
    return lambda config: config.task.eval_task in names


SAMPLED = (BatchInferenceConfig, ChatConfig)


INFERENCE = (
    *rows(
        BatchInferenceConfig,
        (
            "best_of_n prompt_max_len max_new_tokens greedy_sampling temperature top_p repetition_penalty enable_csft "
            "csft_prompt",
            "with --eval_task rm, which generates nothing",
            is_task("rm"),
        ),
        (
            "output_key max_len value_head_prefix post_processor reward_template normalize_reward",
            "without --eval_task rm",
            is_task("generate", "generate_vllm"),
        ),
        (
            "reward_template normalize_reward",
            "without --post_processor csft",
            lambda c: c.task.post_processor != "csft",
        ),
        ("tp_size max_num_seqs enable_prefix_caching", "without --eval_task generate_vllm", is_task("generate", "rm")),
        (
            "micro_batch_size attn_implementation experts_implementation load_in_4bit skip_self_test",
            "with --eval_task generate_vllm",
            is_task("generate_vllm"),
        ),
        ("rollout_batch_size", "without --iter", lambda c: c.task.iter is None),
    ),
    *rows(ChatConfig, ("system_key", "because a chat has no rows", always)),
    *rows(SAMPLED, ("temperature top_p", "with --greedy_sampling", lambda c: c.sampling.greedy_sampling)),
    *rows(ViewConfig, ("port open", "with --export, which starts no server", lambda c: c.page.export)),
    *rows(
        ExportConfig,
        ("param_dtype", "with --gguf, which names the type of the weights", lambda c: c.export.gguf is not None),
        ("param_dtype", "without --output_path", lambda c: not c.export.output_path),
    ),
)
