"""Flags of generation, scoring and chat that have no effect in some runs; see `lines`."""

from openrlhf.config.commands import BatchInferenceConfig, ChatConfig
from openrlhf.config.no_effect.lines import Condition, idle


def is_task(*names: str) -> Condition:
    return lambda config: config.task.eval_task in names


SAMPLED = (BatchInferenceConfig, ChatConfig)


INFERENCE = (
    idle(
        "best_of_n prompt_max_len max_new_tokens greedy_sampling temperature top_p repetition_penalty enable_csft "
        "csft_prompt",
        "with --eval_task rm, which generates nothing",
        BatchInferenceConfig,
        is_task("rm"),
    ),
    idle(
        "output_key max_len value_head_prefix post_processor reward_template normalize_reward",
        "without --eval_task rm",
        BatchInferenceConfig,
        is_task("generate", "generate_vllm"),
    ),
    idle(
        "reward_template normalize_reward",
        "without --post_processor csft",
        BatchInferenceConfig,
        lambda c: c.task.post_processor != "csft",
    ),
    idle(
        "tp_size max_num_seqs enable_prefix_caching",
        "without --eval_task generate_vllm",
        BatchInferenceConfig,
        is_task("generate", "rm"),
    ),
    idle(
        "micro_batch_size attn_implementation experts_implementation load_in_4bit skip_self_test",
        "with --eval_task generate_vllm",
        BatchInferenceConfig,
        is_task("generate_vllm"),
    ),
    idle("rollout_batch_size", "without --iter", BatchInferenceConfig, lambda c: c.task.iter is None),
    idle("temperature top_p", "with --greedy_sampling", SAMPLED, lambda c: c.sampling.greedy_sampling),
)
