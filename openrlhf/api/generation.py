"""Generation from Python: prompts in, answers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike

from openrlhf.api.arguments import as_arguments
from openrlhf.api.start import prepare, run_and_restore
from openrlhf.errors import ConfigError


def generate(
    model: str | PathLike[str],
    prompts: Sequence[str | Sequence[Mapping[str, object]]],
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    greedy_sampling: bool = False,
    best_of_n: int = 1,
    apply_chat_template: bool = False,
    **flags: object,
) -> list[str]:
    """Return a model's answers to the prompts, in order; with `best_of_n`, the answers to a prompt are adjacent.

    `model` is a folder, a hub name or a `TrainResult`. A prompt is a string or, with `apply_chat_template`, a list of
    messages. Other keywords are the flags of `batch_inference`; `eval_task="generate_vllm"` generates with vLLM.

    >>> answers = generate("./model", ["1+1=", "2+1="], max_new_tokens=3, greedy_sampling=True)
    >>> len(answers)
    2
    """
    if isinstance(prompts, str):
        raise ConfigError("prompts= is a string: expected a list of prompts", try_this="prompts=[text]")
    if not prompts:
        return []
    given: dict[str, object] = {
        "pretrain": model,
        "dataset": [{"input": prompt} for prompt in prompts],
        "input_key": "input",
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "greedy_sampling": greedy_sampling,
        "best_of_n": best_of_n,
        "apply_chat_template": apply_chat_template,
        "output_path": "answers.jsonl",  # required by the command; `inference.in_memory` uses a temporary file instead
    }
    if taken := ", ".join(sorted(flags.keys() & given.keys())):
        raise ConfigError(
            f"generate does not take {taken}: it returns the answers to prompts=", try_this="openrlhf batch_inference"
        )
    flags.setdefault("eval_task", "generate")
    with as_arguments("batch_inference", flags | given) as argv:
        return run_and_restore("generate", prepare("batch_inference", argv))
