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
from openrlhf.models.ring import Ring, Share
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
        self.ring: Ring | None = None  # a backend sets it where several processes share each packed row

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
        share = None if self.ring is None else share_of(batch, self.ring)
        hidden, aux_loss = self._hidden(batch, share)
        looked = Looked(hidden, wanted_places(batch, ask), share)
        if ask in ("scores", "values"):
            scalars = looked.join(self.scalar_head(looked.here).squeeze(-1).float())
            if ask == "scores":
                return Outputs(scores=scalars, aux_loss=aux_loss)
            return Outputs(values=_spread(scalars, batch), aux_loss=aux_loss)
        if ask == "target_logits":
            return Outputs(target_logits=looked.join(self.vocabulary_head(looked.here).float()), aux_loss=aux_loss)
        if ask == "hidden":
            return Outputs(hidden=looked.join(looked.here), aux_loss=aux_loss)
        targets = batch.input_ids[batch.target_mask][looked.numbers]
        head, entropy, cross = self.vocabulary_head, None, None
        if ask == "log_probs":
            log_probs = token_log_probs(looked.here, targets, head, temperature=temperature)
        elif ask == "log_probs_and_entropy":
            log_probs, entropy = token_log_probs_and_entropy(looked.here, targets, head, temperature=temperature)
        else:
            assert teacher_hidden is not None, "distillation needs a teacher's hidden states"
            assert teacher_head is not None, "distillation needs a teacher's head"
            teacher_here = teacher_hidden[looked.numbers]
            log_probs, cross = distillation_terms(looked.here, teacher_here, targets, head, teacher_head)
        return Outputs(
            log_probs=_spread(looked.join(log_probs), batch),
            entropy=None if entropy is None else _spread(looked.join(entropy), batch),
            cross=None if cross is None else _spread(looked.join(cross), batch),
            aux_loss=aux_loss,
        )

    def _hidden(self, batch: Batch, share: Share | None) -> tuple[Tensor, Tensor | None]:
        """Last hidden states [places, hidden] of the flattened batch or a share of it; the auxiliary loss if wanted."""
        decoder = self.decoder
        segmented = decoder.config._attn_implementation == SEGMENTED
        kwargs = _packed_inputs(batch) if segmented else _padded_inputs(batch)
        if share is not None:
            kwargs = _shared_inputs(kwargs, share)
        if self.with_aux_loss:
            kwargs["output_router_logits"] = True
        outputs = decoder.base_model(use_cache=False, **kwargs)
        hidden = outputs.last_hidden_state.flatten(0, 1)
        if segmented and batch.input_ids.shape[0] > 1:
            places = (batch.sequence_ids >= 0).flatten().nonzero().squeeze(-1)
            hidden = hidden.new_zeros(batch.input_ids.numel(), hidden.shape[-1]).index_put((places,), hidden)
        if not self.with_aux_loss:
            return hidden, None
        routed = outputs.router_logits if share is None else _whole_row(outputs.router_logits, batch, share)
        return hidden, self._aux_loss(routed, kwargs)

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


class Looked:
    """The hidden states that an output is made of: those of them that are in this process, and how all come together.

    Without a ring that is all of them.
    """

    def __init__(self, hidden: Tensor, wanted: Tensor, share: Share | None) -> None:
        self.share = share
        self.count = len(wanted)
        self.numbers: Any = slice(None) if share is None else share.held(wanted)  # of those here among the wanted
        places = wanted if share is None else share.local(wanted[self.numbers])
        self.here = hidden[places]  # [wanted here, hidden]

    def join(self, values: Tensor) -> Tensor:
        """[wanted, ...] from what each process has made of its own."""
        return values if self.share is None else self.share.join(values, self.numbers, self.count)


def wanted_places(batch: Batch, ask: Ask) -> Tensor:
    """Places in the flattened batch whose hidden states an output is made of."""
    if ask == "scores":
        return last_tokens(batch)
    targets = batch.target_mask.flatten().nonzero().squeeze(-1)
    return targets if ask == "target_logits" else targets - 1  # what predicts a token is the state before it


def share_of(batch: Batch, ring: Ring) -> Share:
    assert len(batch.input_ids) == 1, "a ring shares packed rows"
    starts = (batch.position_ids[0] == 0).nonzero().squeeze(-1)
    return Share.of((*starts.tolist(), batch.input_ids.shape[1]), ring)


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


def _shared_inputs(packed: dict[str, Any], share: Share) -> dict[str, Any]:
    """A process's tokens of a packed row. What fills the row up is a sequence of its own that nobody looks at."""
    missing = share.bounds[-1] - packed["input_ids"].shape[1]
    filling = torch.arange(missing, device=packed["input_ids"].device)
    ids = torch.cat([packed["input_ids"][0], torch.zeros_like(filling)])
    positions = torch.cat([packed["position_ids"][0], filling])
    return packed | {"input_ids": share.cut(ids)[None], "position_ids": share.cut(positions)[None], "share": share}


def _whole_row(router_logits: tuple[Tensor, ...], batch: Batch, share: Share) -> tuple[Tensor, ...]:
    """Each layer's routing of all tokens of a row [tokens, experts], because balance is one number for the whole."""
    places = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
    numbers = share.held(places)
    here = share.local(places[numbers])
    return tuple(share.join(logits[here], numbers, len(places)) for logits in router_logits)


def _padded_inputs(batch: Batch) -> dict[str, Any]:
    """Rows as they are. A packed row has no mask: Transformers then isolates its sequences by their positions."""
    packed = batch.input_ids.shape[0] == 1 and batch.num_sequences > 1
    mask = None if packed else (batch.sequence_ids >= 0).long()
    return {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "attention_mask": mask}
