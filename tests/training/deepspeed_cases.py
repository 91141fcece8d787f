"""A small training run for any backend: networks, micro-batches and objectives, all determined by a seed.

The tests train it in one process, and deepspeed_worker.py and ring_worker.py train it in several. The results must
agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from openrlhf.algo.reduce import Metrics
from openrlhf.algo.token_loss import kd_loss, sft_loss
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import Layout
from openrlhf.data.retokenization import Retokenizer
from openrlhf.models.attention import SEGMENTED
from openrlhf.models.forward import DistillationTerms, HiddenStates, LogProbs, Network, Teacher
from openrlhf.rl.reward_models import ProcessRewardModel
from openrlhf.rl.samples import Batching
from openrlhf.training.backend import Frozen, Run, StepTotals, TrainBackend
from openrlhf.training.moving_average import MovingAverage
from openrlhf.training.objectives import add_aux
from openrlhf.types import Batch

# Larger than rounding errors: otherwise Adam would turn a gradient that is only a rounding error into a full update.
SETTINGS = OptimizerFlags(l2=0.1, adam_eps=1e-5, max_norm=0.5)
RATE = 1e-2
SCALES = (0.5, 1.0, 0.25)
# Row lengths of each micro-batch: three micro-batches per step, so that one of two ranks gets a filler.
STEPS = (((9, 5), (7, 7, 4), (12,)), ((6,), (10, 3), (8, 8)), ((5, 5), (4,), (11, 6, 2)))
VOCABULARY = 80


def load_network(
    folder: str | Path, *, packed: bool = False, lora: bool = False, with_aux_loss: bool = False
) -> Network:
    attention = SEGMENTED if packed else "sdpa"
    if AutoConfig.from_pretrained(folder).model_type == "gpt_oss":
        attention = "eager"  # the only one that computes its attention sinks
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    if lora:
        torch.manual_seed(7)
        model.enable_input_require_grads()
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    return Network(model, with_aux_loss=with_aux_loss)


def make_batch(lengths: Sequence[int], seed: int, *, packed: bool) -> Batch:
    """Return a batch of random tokens; all but the first of each row are targets."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]
    masks = [torch.arange(length) > 0 for length in lengths]
    if packed:
        ids, mask = torch.cat(rows)[None], torch.cat(masks)[None]
    else:
        pad = torch.nn.utils.rnn.pad_sequence
        ids, mask = pad(rows, batch_first=True), pad(masks, batch_first=True)
    return Batch(input_ids=ids, lengths=torch.tensor(lengths), target_mask=mask)


def routed_batch() -> Batch:
    """Return a batch with recorded experts: two of four for each token, in two layers."""
    batch = make_batch((9, 5), 3, packed=False)
    scores = torch.rand(*batch.input_ids.shape, 2, 4, generator=torch.Generator().manual_seed(1))
    return replace(batch, routed_experts=scores.topk(2).indices.to(torch.int16))


def step_batches(step: int, *, packed: bool) -> list[Batch]:
    return [make_batch(lengths, 10 * step + part, packed=packed) for part, lengths in enumerate(STEPS[step])]


def of_rank(batches: Sequence[Batch], rank: int) -> list[Batch]:
    """Return the share of a rank: two micro-batches for the first, one and a filler for the second."""
    first, second, third = batches
    return [first, second] if rank == 0 else [third, replace(first, filler=True)]


class Sft:
    def loss(self, run: Run, batch: Batch, totals: StepTotals) -> tuple[Tensor, Metrics]:
        outputs = run(batch, LogProbs)
        loss, metrics = sft_loss(outputs.log_probs, batch.target_mask, totals.targets)
        return add_aux(loss, metrics, outputs, 0.1, totals)


class Distil(Sft):
    def __init__(self, teacher: Frozen) -> None:
        self.teacher = teacher

    def loss(self, run: Run, batch: Batch, totals: StepTotals) -> tuple[Tensor, Metrics]:
        hidden = self.teacher.forward(batch, HiddenStates).hidden
        outputs = run(batch, DistillationTerms, teacher=Teacher(hidden, self.teacher.network.vocabulary_head))
        return kd_loss(outputs.log_probs, outputs.cross, batch.target_mask, totals.targets, 0.4)


def train(
    backend: TrainBackend, steps: Sequence[Sequence[Batch]], objective: Any = None, *, first: int = 0
) -> dict[str, Any]:
    """Train on one list of micro-batches per step; return the results of each step as plain numbers."""
    losses, norms, measured = [], [], []
    for number, batches in enumerate(steps, start=first):
        result = backend.forward_backward(batches, objective or Sft())
        losses.append(result.losses.sum().item())
        mean = result.metrics["gpt_loss"]
        measured.append([mean.total.item(), mean.count.item()])
        norms.append(backend.optim_step(SCALES[number]))
    return {"losses": losses, "norms": norms, "metrics": measured}


def train_average(
    backend: TrainBackend, steps: Sequence[Sequence[Batch]], *, write: Path | None = None, resume: Path | None = None
) -> MovingAverage:
    """Train and average the weights after each step; save after the first one, or resume what was saved then."""
    average = MovingAverage(backend, 0.75)
    if resume is not None:
        backend.load(resume)
        average.load(resume)
    for number, batches in enumerate(steps, start=0 if resume is None else 1):
        train(backend, [batches], first=number)
        average.update()
        if write is not None and number == 0:
            write.mkdir(exist_ok=True)
            backend.save(write)
            average.save(write)
    return average


def judged_rows(rank: int) -> list[NDArray[np.int32]]:
    """Return rows whose steps end at token 5: many steps for the first rank, one for the second."""
    return [
        np.array([7, 5, 9, length, 5, *[8] * length], np.int32) for length in ((3, 9, 4, 6, 20) if not rank else (2,))
    ]


def step_scorer(model: Frozen) -> ProcessRewardModel:
    tokenizer: Any = None  # not needed: the rows are already tokens
    batching = Batching(Layout(packing=True, pad_id=0), size=1, token_budget=24)
    return ProcessRewardModel(model, Retokenizer(tokenizer, tokenizer, shared=True), batching, 5, (11, 12), "mean")
