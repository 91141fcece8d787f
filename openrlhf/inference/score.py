"""Scoring for batch_inference: rewards for the answers of a dataset, by an outcome or a process reward model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from openrlhf.config.commands import BatchInferenceConfig
from openrlhf.config.sections.data import ResponseFlags
from openrlhf.data.answers import INDEX, Answer, one_slice, waiting_answers
from openrlhf.data.collate import Layout
from openrlhf.data.process import one_token
from openrlhf.data.readings import Texts
from openrlhf.data.records import Records
from openrlhf.errors import RewardError
from openrlhf.inference.parts import Parts
from openrlhf.models.forward import Network
from openrlhf.models.load import load_causal_lm, load_scalar_model, read_config
from openrlhf.monitor import say
from openrlhf.rl.reward_models import OutcomeScorer, ProcessScorer, Scorer
from openrlhf.rl.samples import Batching
from openrlhf.training.device import choose_device, explain_precision
from openrlhf.training.explain import explain_experts
from openrlhf.training.local import LocalFrozen
from openrlhf.training.progress import Progress


def plan_scoring(config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, records: Records) -> list[Answer]:
    """Read and tokenise the answers of this run."""
    chosen, _ = one_slice(records, config.task.iter, config.task.rollout_batch_size)
    fields = ResponseFlags(input_key=config.data.input_key, output_key=config.data.output_key)
    return waiting_answers(chosen, tokenizer, fields, config.template, config.data.max_len)


def score(
    config: BatchInferenceConfig, answers: Sequence[Answer], parts: Parts, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Score the missing rows of this process's share, batched by similar length, longest first."""
    missing = sorted(parts.missing, key=lambda number: -len(answers[number].input_ids))
    if not missing:
        return
    scorer = open_scorer(config, tokenizer, choose_device(config.model.device, config.task.local_rank))
    size = config.task.micro_batch_size
    with Progress("score", total=len(parts.share), done=len(parts.share) - len(missing)) as progress:
        for start in range(0, len(missing), size):
            numbers = missing[start : start + size]
            rewards = scorer.score_rows([answers[number].input_ids for number in numbers]).tolist()
            for number, reward in zip(numbers, rewards, strict=True):
                parts.write(number, scored_row(answers[number], reward))
                progress.advance(tokens=len(answers[number].input_ids))


def scored_row(answer: Answer, reward: float) -> dict[str, object]:
    """Format an answer and its reward as a row of the output; a reward that is not finite is an error."""
    if not math.isfinite(reward):
        raise RewardError(f"the reward model gives {reward} to the answer {answer.response[:80]!r}")
    row: dict[str, object] = {"input": answer.prompt, "output": answer.response, "reward": reward}
    return row if answer.index is None else row | {INDEX: answer.index}


def open_scorer(config: BatchInferenceConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> Scorer:
    """Load the model in --pretrain; its config.json tells a process reward model from an outcome reward model."""
    explain_precision(config.model.param_dtype, device)
    explain_experts(config.model, str(config.model.pretrain))
    name = str(config.model.pretrain)
    saved = read_config(name, config.model).to_dict()
    texts = Texts(tokenizer, tokenizer, shared=True)
    batching = Batching(Layout(packing=False, pad_id=tokenizer.pad_token_id), config.task.micro_batch_size)
    if "placeholder_token" in saved:
        model = load_causal_lm(name, config.model, device=device, packing=False)
        return ProcessScorer(
            LocalFrozen(Network(model, self_test=not config.model.skip_self_test), device),
            texts,
            batching,
            one_token(tokenizer, saved["placeholder_token"], "placeholder_token in config.json"),
            tuple(one_token(tokenizer, token, "reward_tokens in config.json") for token in saved["reward_tokens"]),
        )
    prefix = config.head.value_head_prefix
    model = load_scalar_model(name, config.model, device=device, packing=False, head_prefix=prefix)
    mean, std = saved.get("mean", 0.0), saved.get("std", 1.0)
    if "mean" in saved:
        say(f"rewards are normalised by the mean ({mean:.4g}) and std ({std:.4g}) in the model's config.json")
    return OutcomeScorer(
        LocalFrozen(Network(model, self_test=not config.model.skip_self_test), device),
        texts,
        batching,
        mean=mean,
        std=std,
    )
