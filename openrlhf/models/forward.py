"""A model as training sees it: per-token log-probs, a scalar per token or per sequence, logits at chosen places.

One module, `Network`, wraps any decoder of Transformers. Everything that a backend shards or hooks happens inside its
`forward`, and what it returns is aligned to tokens as `types.py` has it.
"""

import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.errors import ConfigError
from openrlhf.models.attention import SEGMENTED
from openrlhf.models.chunks import Head, distillation_terms, token_log_probs, token_log_probs_and_entropy
from openrlhf.models.heads import SCALAR_HEAD, VocabularyHead
from openrlhf.types import Batch

Ask = Literal["log_probs", "log_probs_and_entropy", "hidden", "distillation", "scores", "values", "target_logits"]


@dataclass(frozen=True)
class Outputs:
    """What was asked for; the rest is None."""

    log_probs: Tensor | None = None  # [rows, tokens], 0 where target_mask is False
    entropy: Tensor | None = None  # [rows, tokens], the same
    cross: Tensor | None = None  # [rows, tokens]: sum of p_teacher x log p_student
    hidden: Tensor | None = None  # [targets, hidden]: the states that predict each target
    scores: Tensor | None = None  # [sequences]: the scalar head at the last token
    values: Tensor | None = None  # [rows, tokens]: the scalar head before each token
    target_logits: Tensor | None = None  # [targets, vocabulary]: at the targets themselves
    aux_loss: Tensor | None = None  # a mixture-of-experts' load-balancing loss


class Network(nn.Module):
    """A decoder with a vocabulary head or a scalar head."""

    def __init__(self, model: nn.Module, *, with_aux_loss: bool = False) -> None:
        super().__init__()
        self.model = model
        self.with_aux_loss = with_aux_loss

    @property
    def decoder(self) -> PreTrainedModel:
        """The Transformers model, under adapters where there are any."""
        model: Any = self.model
        return model if isinstance(model, PreTrainedModel) else model.get_base_model()

    @property
    def scalar_head(self) -> nn.Module:
        return self.decoder.get_submodule(SCALAR_HEAD)

    @property
    def vocabulary_head(self) -> VocabularyHead:
        decoder: Any = self.decoder
        return VocabularyHead(decoder.get_output_embeddings(), decoder.config)

    def forward(
        self,
        batch: Batch,
        ask: Ask,
        *,
        temperature: float = 1.0,
        teacher_hidden: Tensor | None = None,
        teacher_head: Head | None = None,
    ) -> Outputs:
        hidden, aux_loss = self._hidden(batch)
        if ask in ("scores", "values"):
            return self._scalars(hidden, batch, ask, aux_loss)
        rows, places = batch.target_mask.nonzero(as_tuple=True)
        if ask == "target_logits":
            return Outputs(target_logits=self.vocabulary_head(hidden[rows, places]).float(), aux_loss=aux_loss)
        before = hidden[rows, places - 1]  # the state that predicts a token is the one before it
        if ask == "hidden":
            return Outputs(hidden=before, aux_loss=aux_loss)
        targets = batch.input_ids[rows, places]
        entropy = cross = None
        if ask == "log_probs":
            log_probs = token_log_probs(before, targets, self.vocabulary_head, temperature=temperature)
        elif ask == "log_probs_and_entropy":
            log_probs, entropy = token_log_probs_and_entropy(
                before, targets, self.vocabulary_head, temperature=temperature
            )
        else:
            assert teacher_hidden is not None, "distillation needs a teacher's hidden states"
            assert teacher_head is not None, "distillation needs a teacher's head"
            log_probs, cross = distillation_terms(before, teacher_hidden, targets, self.vocabulary_head, teacher_head)
        return Outputs(
            log_probs=_spread(log_probs, batch),
            entropy=None if entropy is None else _spread(entropy, batch),
            cross=None if cross is None else _spread(cross, batch),
            aux_loss=aux_loss,
        )

    def _scalars(self, hidden: Tensor, batch: Batch, ask: Ask, aux_loss: Tensor | None) -> Outputs:
        if ask == "scores":
            last = last_tokens(batch)  # [sequences] into the flattened batch
            scores = self.scalar_head(hidden.flatten(0, 1)[last]).squeeze(-1).float()
            return Outputs(scores=scores, aux_loss=aux_loss)
        values = self.scalar_head(hidden).squeeze(-1).float()
        before = torch.zeros_like(values)
        before[:, 1:] = values[:, :-1]
        return Outputs(values=before.masked_fill(~batch.target_mask, 0.0), aux_loss=aux_loss)

    def _hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Last hidden states [rows, tokens, hidden] of the batch's layout, and the auxiliary loss where wanted."""
        decoder = self.decoder
        segmented = decoder.config._attn_implementation == SEGMENTED
        kwargs = _packed_inputs(batch) if segmented else _padded_inputs(batch)
        if self.with_aux_loss:
            kwargs["output_router_logits"] = True
        outputs = decoder.base_model(use_cache=False, **kwargs)
        hidden = outputs.last_hidden_state
        if segmented and batch.input_ids.shape[0] > 1:
            rows, places = (batch.sequence_ids >= 0).nonzero(as_tuple=True)
            hidden = hidden.new_zeros(*batch.input_ids.shape, hidden.shape[-1]).index_put((rows, places), hidden[0])
        return hidden, self._aux_loss(outputs.router_logits, kwargs) if self.with_aux_loss else None

    def _aux_loss(self, router_logits: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Tensor:
        """Load balancing as the model's own module defines it (Switch Transformer, arXiv 2101.03961, eq. 4)."""
        decoder = self.decoder
        balance = vars(sys.modules[type(decoder).__module__])["load_balancing_loss_func"]
        config: Any = decoder.config
        if self.training and torch.is_grad_enabled() and not router_logits[0].requires_grad:
            raise ConfigError(
                "--gradient_checkpointing_use_reentrant hides the routers, so --aux_loss_coef would balance nothing",
                try_this="--gradient_checkpointing alone",
            )
        experts = config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts
        return balance(router_logits, experts, config.num_experts_per_tok, kwargs.get("attention_mask"))


def last_tokens(batch: Batch) -> Tensor:
    """Place of each sequence's last token in the flattened batch: [sequences]."""
    ids = batch.sequence_ids.flatten()
    places = torch.arange(ids.numel(), device=ids.device)
    last = places.new_zeros(batch.num_sequences)
    real = ids >= 0
    return last.scatter_reduce(0, ids[real], places[real], reduce="amax")


def _spread(per_target: Tensor, batch: Batch) -> Tensor:
    """[targets] back to [rows, tokens], zero elsewhere."""
    return per_target.new_zeros(batch.target_mask.shape).masked_scatter(batch.target_mask, per_target)


def _packed_inputs(batch: Batch) -> dict[str, Any]:
    """One row without padding, its sequences bounded by cumulative lengths."""
    real = batch.sequence_ids >= 0
    starts = (batch.position_ids[real] == 0).nonzero().squeeze(-1)
    total = torch.tensor([int(real.sum())], device=starts.device)
    bounds = torch.cat([starts, total]).to(torch.int32)
    longest = int(batch.position_ids.max()) + 1
    return {
        "input_ids": batch.input_ids[real][None],
        "position_ids": batch.position_ids[real][None],
        "attention_mask": None,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _padded_inputs(batch: Batch) -> dict[str, Any]:
    """Rows as they are. A packed row has no mask: Transformers then isolates its sequences by their positions."""
    packed = batch.input_ids.shape[0] == 1 and batch.num_sequences > 1
    mask = None if packed else (batch.sequence_ids >= 0).long()
    return {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "attention_mask": mask}
