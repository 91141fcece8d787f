"""A model as training uses it: per-token log-probs, a scalar per token or per sequence, logits at chosen positions.

One module, `Network`, wraps any decoder of Transformers. Everything that a backend shards or hooks happens inside its
`forward`, and its outputs are aligned to tokens as `types.py` defines: the value at position t belongs to token t.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.errors import ConfigError
from openrlhf.models.attention import packs
from openrlhf.models.chunks import Head, distillation_terms, token_log_probs, token_log_probs_and_entropy
from openrlhf.models.heads import SCALAR_HEAD, VocabularyHead, decoder_name, logit_factor
from openrlhf.models.inputs import CallLayout, DecoderCall, convolution_reach, decoder_calls, single_calls
from openrlhf.models.ring import Ring, Share
from openrlhf.types import Batch


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a forward pass returns. The caller names the kind it wants: `network(batch, LogProbs).log_probs`."""

    aux_loss: Tensor | None = None  # load-balancing loss of a mixture of experts, if it is trained with one


@dataclass(frozen=True, kw_only=True)
class LogProbs(Outputs):
    """Log-probs of the target tokens."""

    log_probs: Tensor  # [rows, tokens], 0 if target_mask is False


@dataclass(frozen=True, kw_only=True)
class LogProbsAndEntropy(LogProbs):
    """Log-probs of the target tokens, and the entropy of the distributions that they are drawn from."""

    entropy: Tensor  # [rows, tokens], 0 if target_mask is False


@dataclass(frozen=True, kw_only=True)
class DistillationTerms(LogProbs):
    """Log-probs of the target tokens, and the cross-entropy term with a teacher."""

    cross: Tensor  # [rows, tokens]: sum over the vocabulary of p_teacher x log p_student


@dataclass(frozen=True, kw_only=True)
class HiddenStates(Outputs):
    """The states that the vocabulary head turns into predictions, for a student to learn from."""

    hidden: Tensor  # [targets, hidden]: the state that predicts each target


@dataclass(frozen=True, kw_only=True)
class Scores(Outputs):
    """The scalar head at the last token of each sequence."""

    scores: Tensor  # [sequences]


@dataclass(frozen=True, kw_only=True)
class Values(Outputs):
    """The scalar head before each target token."""

    values: Tensor  # [rows, tokens], 0 if target_mask is False


@dataclass(frozen=True, kw_only=True)
class TargetLogits(Outputs):
    """Logits at the targets themselves, which predict the tokens after them."""

    logits: Tensor  # [targets, vocabulary]


@dataclass(frozen=True, kw_only=True)
class OwnLogProbs(LogProbs):
    """Log-probs by the model's own forward, each sequence alone: the reference of the self-test."""


@dataclass(frozen=True, kw_only=True)
class OwnScores(Scores):
    """Scores by the model's own forward, each sequence alone: the reference of the self-test."""


@dataclass(frozen=True)
class Teacher:
    """A teacher's view of a batch: its hidden states and the head that turns them into logits."""

    hidden: Tensor  # [targets, hidden]
    head: Head


Wanted = TypeVar("Wanted", bound=Outputs)


class Network(nn.Module):
    """A decoder with a vocabulary head or a scalar head."""

    def __init__(self, model: nn.Module, *, with_aux_loss: bool = False, self_test: bool = True) -> None:
        super().__init__()
        self.model = model
        self.self_test = self_test  # compare with the model's own forward before first use (`self_test.py`)
        self.with_aux_loss = with_aux_loss
        self.layout: CallLayout = "packed" if packs(self.decoder.config) else "padded"  # until the self-test
        self.ring: Ring | None = None  # set by the backend if several processes share each packed row

    @property
    def decoder(self) -> PreTrainedModel:
        """The Transformers model, without the PEFT wrapper if there is one."""
        model: Any = self.model
        return model if isinstance(model, PreTrainedModel) else model.get_base_model()

    @property
    def decoder_without_head(self) -> nn.Module:
        return self.decoder.get_submodule(decoder_name(self.decoder))

    @property
    def scalar_head(self) -> nn.Module:
        return self.decoder.get_submodule(SCALAR_HEAD)

    @property
    def vocabulary_head(self) -> VocabularyHead:
        return VocabularyHead(self.decoder, self._logit_factor)

    @cached_property
    def _logit_factor(self) -> float | None:
        return logit_factor(self.decoder)

    @cached_property
    def _gap(self) -> int:
        return convolution_reach(self.decoder)

    @cached_property
    def _accepted(self) -> frozenset[str] | None:
        """Names of the arguments that the decoder accepts; None if it accepts any."""
        parameters = inspect.signature(self.decoder_without_head.forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return None if takes_any else frozenset(parameters)

    def forward(
        self, batch: Batch, wanted: type[Wanted], *, temperature: float | Tensor = 1.0, teacher: Teacher | None = None
    ) -> Wanted:
        """Run the decoder over a batch and return the requested kind of outputs.

        `temperature` divides the logits: a single one, or [rows, tokens]. `teacher` is for DistillationTerms.
        """
        if issubclass(wanted, OwnLogProbs | OwnScores):
            found, aux_loss = self._own(batch, scores=issubclass(wanted, OwnScores)), None
        else:
            found, aux_loss = self._compute(batch, wanted, temperature, teacher)
        return wanted(aux_loss=aux_loss, **found)

    def _compute(
        self, batch: Batch, wanted: type[Outputs], temperature: float | Tensor, teacher: Teacher | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the requested outputs by field name, and the auxiliary loss."""
        share = None
        if self.ring is not None:
            assert len(batch.input_ids) == 1, "a ring shares packed rows"
            starts = (batch.position_ids[0] == 0).nonzero().squeeze(-1)  # [sequences]
            share = Share.of((*starts.tolist(), batch.input_ids.shape[1]), self.ring)
        hidden, aux_loss = self._hidden(batch, share)  # [tokens, hidden]
        states = SelectedStates(hidden, selected_places(batch, wanted), share)
        if issubclass(wanted, Scores | Values):
            scalars = states.join(self.scalar_head(states.here).squeeze(-1).float())  # [sequences] or [targets]
            found = {"scores": scalars} if issubclass(wanted, Scores) else {"values": _spread(scalars, batch)}
        elif issubclass(wanted, TargetLogits):
            found = {"logits": states.join(self.vocabulary_head(states.here).float())}
        elif issubclass(wanted, HiddenStates):
            found = {"hidden": states.join(states.here)}
        else:
            terms = self._log_prob_terms(states, batch, wanted, temperature, teacher)
            found = {name: _spread(states.join(values), batch) for name, values in terms.items()}
        return found, aux_loss

    def _log_prob_terms(
        self,
        states: SelectedStates,
        batch: Batch,
        wanted: type[Outputs],
        temperature: float | Tensor,
        teacher: Teacher | None,
    ) -> dict[str, Tensor]:
        """Return log-probs, and entropy or cross-entropy if requested, by field name: [targets here] each."""
        head = self.vocabulary_head
        targets = states.select(batch.input_ids[batch.target_mask])  # [targets here]
        if isinstance(temperature, Tensor):  # [rows, tokens] to [targets here]
            temperature = states.select(temperature.to(targets.device)[batch.target_mask])
        if issubclass(wanted, LogProbsAndEntropy):
            log_probs, entropy = token_log_probs_and_entropy(states.here, targets, head, temperature=temperature)
            return {"log_probs": log_probs, "entropy": entropy}
        if issubclass(wanted, DistillationTerms):
            if teacher is None:
                raise ValueError("distillation needs a teacher")
            taught = states.select(teacher.hidden)  # [targets here, hidden of the teacher]
            log_probs, cross = distillation_terms(states.here, taught, targets, head, teacher.head)
            return {"log_probs": log_probs, "cross": cross}
        return {"log_probs": token_log_probs(states.here, targets, head, temperature=temperature)}

    def _hidden(self, batch: Batch, share: Share | None) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden states [tokens, hidden] of the flattened batch or a share, and the auxiliary loss."""
        calls = list(decoder_calls(batch, self.layout, self._gap))
        if share is not None:
            calls = [DecoderCall(_shared_inputs(call.arguments, share)) for call in calls]
        outputs = [self._call_decoder(call) for call in calls]
        hidden = _in_batch_order(calls, [output.last_hidden_state for output in outputs], batch)
        if not self.with_aux_loss:
            return hidden, None
        # [tokens, experts] for each layer, over all calls
        routed = tuple(torch.cat(layer) for layer in zip(*(output.router_logits for output in outputs), strict=True))
        if share is not None:
            routed = _whole_row(routed, batch, share)
        return hidden, self._aux_loss(routed, calls[0].arguments["attention_mask"])

    def _call_decoder(self, call: DecoderCall) -> Any:
        """Call the decoder with those arguments that it accepts."""
        arguments = call.arguments | {"use_cache": False}
        if self.with_aux_loss:
            arguments["output_router_logits"] = True
        if self._accepted is not None:
            arguments = {name: value for name, value in arguments.items() if name in self._accepted}
        return self.decoder_without_head(**arguments)

    def _own(self, batch: Batch, *, scores: bool) -> dict[str, Tensor]:
        """Return scores [sequences] or log-probs [rows, tokens] by the model's own forward, each sequence alone."""
        per_sequence = []  # scores, [] each
        log_probs = torch.zeros(batch.input_ids.numel(), device=batch.input_ids.device)
        for call in single_calls(batch):
            ids = call.arguments["input_ids"]  # [1, tokens]
            logits = self.decoder(input_ids=ids).logits.float()  # [1, 1] or [1, tokens, vocabulary]
            if scores:
                per_sequence.append(logits.squeeze())
            elif call.batch_places is not None:
                found = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])  # [tokens - 1, 1]
                log_probs[call.batch_places[1:]] = found.squeeze(-1)
        if scores:
            return {"scores": torch.stack(per_sequence)}
        return {"log_probs": torch.where(batch.target_mask, log_probs.view_as(batch.target_mask), 0.0)}

    def _aux_loss(self, router_logits: tuple[Tensor, ...], attention_mask: Tensor | None) -> Tensor:
        """Return the load-balancing loss of the model's own module (Switch Transformer, arXiv 2101.03961, eq. 4)."""
        decoder = self.decoder
        balance = vars(sys.modules[type(decoder).__module__])["load_balancing_loss_func"]
        config: Any = decoder.config
        if self.training and torch.is_grad_enabled() and not router_logits[0].requires_grad:
            raise ConfigError(
                "--gradient_checkpointing_use_reentrant hides the routers, so --aux_loss_coef would balance nothing",
                try_this="--gradient_checkpointing alone",
            )
        experts = config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts
        return balance(router_logits, experts, config.num_experts_per_tok, attention_mask)


class SelectedStates:
    """The hidden states that an output is computed from: those in this process, and how to join all processes' results.

    Without a ring, all of them are in this process.
    """

    def __init__(self, hidden: Tensor, places: Tensor, share: Share | None) -> None:
        self.share = share
        self.places = places
        self.here = hidden[places if share is None else share.local(self.select(places))]  # [selected here, hidden]

    def select(self, values: Tensor) -> Tensor:
        """Return [selected here, ...] of [selected, ...]."""
        return values if self.share is None else values[self.share.held(self.places)]

    def join(self, values: Tensor) -> Tensor:
        """Return [selected, ...] in every process, joined from what each computed for its own [selected here, ...]."""
        if self.share is None:
            return values
        return self.share.join(values, self.share.held(self.places), len(self.places))


def selected_places(batch: Batch, wanted: type[Outputs]) -> Tensor:
    """Return the positions in the flattened batch whose hidden states an output is computed from."""
    if issubclass(wanted, Scores):
        return last_tokens(batch)
    targets = batch.target_mask.flatten().nonzero().squeeze(-1)  # [targets]
    return targets if issubclass(wanted, TargetLogits) else targets - 1  # a token is predicted by the state before it


def last_tokens(batch: Batch) -> Tensor:
    """Return the position of each sequence's last token in the flattened batch, [sequences]."""
    ids = batch.sequence_ids.flatten()
    places = torch.arange(ids.numel(), device=ids.device)
    last = places.new_zeros(batch.num_sequences)
    real = ids >= 0
    return last.scatter_reduce(0, ids[real], places[real], reduce="amax")


def _spread(per_target: Tensor, batch: Batch) -> Tensor:
    """Scatter [targets] to [rows, tokens], zero elsewhere."""
    return per_target.new_zeros(batch.target_mask.shape).masked_scatter(batch.target_mask, per_target)


def _in_batch_order(calls: list[DecoderCall], states: list[Tensor], batch: Batch) -> Tensor:
    """Return hidden states [rows x tokens, hidden] of the flattened batch from those of the calls, zero on padding."""
    flat = [state.flatten(0, 1) for state in states]
    flat = [
        state if call.output_places is None else state[call.output_places]
        for state, call in zip(flat, calls, strict=True)
    ]
    if calls[0].batch_places is None:  # one call, in the batch's own order
        return flat[0]
    places = torch.cat([call.batch_places for call in calls if call.batch_places is not None])
    hidden = torch.cat(flat)
    return hidden.new_zeros(batch.input_ids.numel(), hidden.shape[-1]).index_put((places,), hidden)


def _shared_inputs(packed: dict[str, Any], share: Share) -> dict[str, Any]:
    """Return the inputs for this process's tokens of a packed row.

    The tokens that pad the row form their own sequence, whose outputs are not used.
    """
    missing = share.bounds[-1] - packed["input_ids"].shape[1]
    filling = torch.arange(missing, device=packed["input_ids"].device)
    ids = torch.cat([packed["input_ids"][0], torch.zeros_like(filling)])
    positions = torch.cat([packed["position_ids"][0], filling])
    return packed | {"input_ids": share.cut(ids)[None], "position_ids": share.cut(positions)[None], "share": share}


def _whole_row(router_logits: tuple[Tensor, ...], batch: Batch, share: Share) -> tuple[Tensor, ...]:
    """Return each layer's router logits of the whole row, [tokens, experts].

    The load-balancing loss is one number for all tokens, so each process needs the logits of the others.
    """
    places = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
    numbers = share.held(places)
    here = share.local(places[numbers])
    return tuple(share.join(logits[here], numbers, len(places)) for logits in router_logits)
