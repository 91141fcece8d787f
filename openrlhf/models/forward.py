"""`Network` wraps a decoder of Transformers and returns the outputs that training needs.

The outputs are log-probs per token, scalars per token or sequence, or logits at selected positions. They are aligned
to tokens as defined in `types.py`: the value at position t belongs to token t. All modules run inside `forward`, so
that backends can shard and hook them.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from openrlhf.algo.expert_balance import router_loads
from openrlhf.errors import ConfigError
from openrlhf.models.attention import FLASH_PACKAGES, SEGMENTED
from openrlhf.models.chunks import PLAIN, Head, distillation_terms, token_log_probs, token_log_probs_and_entropy
from openrlhf.models.heads import SCALAR_HEAD, VocabularyHead, decoder_name, logit_factor
from openrlhf.models.inputs import (
    Arguments,
    CallLayout,
    DecoderCall,
    batch_tokens,
    packed_call,
    padded_call,
    shared_call,
    single_calls,
)
from openrlhf.models.ring import Ring, Share
from openrlhf.models.router_replay import RoutedLayers
from openrlhf.types import NOT_RECORDED, Batch, SharedPrefixes


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Base class of the outputs of a forward pass; callers select a subclass: `network(batch, LogProbs).log_probs`."""

    # With a load-balancing loss, [experts] each, means over layers: the tokens that each expert gets, and the sum of
    # its probabilities over tokens.
    expert_counts: Tensor | None = None
    expert_probabilities: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LogProbs(Outputs):
    """Log-probs of the target tokens."""

    log_probs: Tensor  # [rows, tokens], 0 if target_mask is False


@dataclass(frozen=True, kw_only=True)
class LogProbsAndEntropy(LogProbs):
    """Log-probs of the target tokens, and the entropy of the predicted distributions."""

    entropy: Tensor  # [rows, tokens], 0 if target_mask is False


@dataclass(frozen=True, kw_only=True)
class DistillationTerms(LogProbs):
    """Log-probs of the target tokens, and the cross-entropy term with a teacher."""

    cross: Tensor  # [rows, tokens]: sum over the vocabulary of p_teacher x log p_student


@dataclass(frozen=True, kw_only=True)
class HiddenStates(Outputs):
    """Hidden states before the vocabulary head, which distillation needs from the teacher."""

    hidden: Tensor  # [targets, hidden]: the state that predicts each target


@dataclass(frozen=True, kw_only=True)
class Scores(Outputs):
    """Outputs of the scalar head at the last token of each sequence."""

    scores: Tensor  # [sequences]


@dataclass(frozen=True, kw_only=True)
class Values(Outputs):
    """Outputs of the scalar head at the token before each target."""

    values: Tensor  # [rows, tokens], 0 if target_mask is False


@dataclass(frozen=True, kw_only=True)
class TargetLogits(Outputs):
    """Logits at the position of each target, where the next token is predicted."""

    logits: Tensor  # [targets, vocabulary]


@dataclass(frozen=True, kw_only=True)
class OwnLogProbs(LogProbs):
    """Log-probs from the model's own forward, one sequence per call: the reference for the self-test."""


@dataclass(frozen=True, kw_only=True)
class OwnScores(Scores):
    """Scores from the model's own forward, one sequence per call: the reference for the self-test."""


@dataclass(frozen=True)
class Teacher:
    """A teacher's hidden states for a batch, and the head that maps them to logits."""

    hidden: Tensor  # [targets, hidden]
    head: Head


Requested = TypeVar("Requested", bound=Outputs)


class Network(nn.Module):
    """A decoder with a vocabulary head or a scalar head."""

    def __init__(self, model: nn.Module, *, with_aux_loss: bool = False, self_test: bool = True) -> None:
        super().__init__()
        self.model = model
        self.self_test = self_test  # compare with the model's own forward before first use (`self_test.py`)
        self.with_aux_loss = with_aux_loss
        packs = self.decoder.config._attn_implementation in (SEGMENTED, *FLASH_PACKAGES)
        self.layout: CallLayout = "packed" if packs else "padded"  # the self-test may change it
        self.shares_prefixes = False  # compute prefixes that sequences have in common once; set by the self-test
        self.ring: Ring | None = None  # set by the backend if several processes share each packed row
        self.routed: RoutedLayers | None = None  # set for a policy that uses the experts chosen by the engine
        self.logit_passes = PLAIN  # compiled with the layers (`training/compilation.py`)
        self.computes_in: torch.dtype | None = None  # set by a backend that keeps weights in another precision

    @property
    def decoder(self) -> PreTrainedModel:
        """The Transformers model, without the PEFT wrapper if there is one."""
        model: Any = self.model
        return model if isinstance(model, PreTrainedModel) else model.get_base_model()

    @property
    def dtype(self) -> torch.dtype:
        """The precision of forward and backward passes, and of exported weights."""
        return self.computes_in or self.decoder.dtype

    @property
    def decoder_without_head(self) -> nn.Module:
        return self.decoder.get_submodule(decoder_name(self.decoder))

    @property
    def scalar_head(self) -> nn.Module:
        return self.decoder.get_submodule(SCALAR_HEAD)

    @cached_property
    def vocabulary_head(self) -> VocabularyHead:
        return VocabularyHead(self.decoder, logit_factor(self.decoder))

    @cached_property
    def _convolution_reach(self) -> int:
        """Number of previous tokens that the widest convolution reads."""
        kernels = (module.kernel_size[0] for module in self.decoder.modules() if isinstance(module, nn.Conv1d))
        return max(kernels, default=1) - 1

    @property
    def may_share_prefixes(self) -> bool:
        """Whether prefixes may be computed once, if the self-test agrees: only attention may connect tokens.

        The load-balancing loss of experts counts every token, so it must see each prefix as often as it occurs.
        """
        packs = self.layout == "packed" and self.decoder.config._attn_implementation == SEGMENTED
        return packs and self.ring is None and not self._convolution_reach and not self.with_aux_loss

    @property
    def sharing_limit(self) -> int:
        """Tokens of the longest sequence whose prefix may be shared; 0 if prefixes are not shared."""
        return int(min(self._window, sys.maxsize)) if self.shares_prefixes else 0

    def prefixes_of(self, batch: Batch) -> SharedPrefixes | None:
        """Return the prefixes of a batch that are computed once; None if each sequence has its own copy.

        A continuation attends to all of its prefix, so no window may be shorter than the whole sequence.
        """
        prefixes = batch.prefixes
        return prefixes if prefixes is not None and prefixes.longest_sequence <= self.sharing_limit else None

    @cached_property
    def _window(self) -> float:
        """The longest distance at which every layer attends, in tokens."""
        config = self.decoder.config.get_text_config().to_dict()
        windows = [config.get("attention_chunk_size")]  # layers of Llama 4 attend within chunks
        if config.get("use_sliding_window", True):
            windows.append(config.get("sliding_window"))
        return min((window for window in windows if window), default=math.inf)

    @cached_property
    def _accepted(self) -> frozenset[str] | None:
        """Names of the arguments that the decoder accepts; None if it accepts arbitrary ones."""
        parameters = inspect.signature(self.decoder_without_head.forward).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return None if takes_any else frozenset(parameters)

    def forward(
        self, batch: Batch, kind: type[Requested], *, temperature: float | Tensor = 1.0, teacher: Teacher | None = None
    ) -> Requested:
        """Run the decoder over a batch and return the requested kind of outputs.

        `temperature` divides the logits: one value, or [rows, tokens]. `teacher` is required for DistillationTerms.
        """
        if kind in (OwnLogProbs, OwnScores):
            return kind(**self._own(batch, scores=kind is OwnScores))
        share = None
        if self.ring is not None:
            assert len(batch.input_ids) == 1, "ring attention needs a packed row"
            share = Share.of((*batch.places.starts.tolist(), batch.input_ids.shape[1]), self.ring)
        hidden, rows, loads = self._hidden(batch, share)

        # Positions in the flattened batch of the hidden states that the head is applied to, [selected].
        if issubclass(kind, Scores):
            places = batch.places.last  # [sequences]
        else:
            places = batch.places.targets  # [targets]
            if not issubclass(kind, TargetLogits):
                places = places - 1  # a token is predicted by the state before it
        # Indices of the positions in this process, [selected here].
        held: Any = slice(None) if share is None else share.held(places)
        here = places if share is None else share.local(places[held])
        selected = hidden[here if rows is None else rows[here]]
        found = self._apply_head(selected, held, batch, kind, temperature, teacher)
        if share is not None:  # every process needs all outputs
            found = {name: share.join(values, held, len(places)) for name, values in found.items()}
        if issubclass(kind, LogProbs | Values):  # scatter [targets] to [rows, tokens]
            shape = batch.target_mask.shape
            found = {
                name: values.new_zeros(shape.numel()).index_put((batch.places.targets,), values).view(shape)
                for name, values in found.items()
            }
        return kind(**loads, **found)

    def _hidden(self, batch: Batch, share: Share | None) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Run the decoder over a batch or share.

        Return its last hidden states [rows, hidden], the row of each token of the flattened batch (None: in the same
        order), and the router loads of `Outputs` by field.
        """
        prefixes = self.prefixes_of(batch)
        if prefixes is not None:
            calls = [shared_call(batch, prefixes)]
        elif self.layout == "packed":
            calls = [packed_call(batch, gap=self._convolution_reach)]
        else:
            calls = [padded_call(batch)] if self.layout == "padded" else list(single_calls(batch))
        extra = {"use_cache": False} | ({"output_router_logits": True} if self.with_aux_loss else {})
        outputs = []
        for call in calls:
            arguments = (call.arguments if share is None else _shared_inputs(call.arguments, share)) | extra
            if self._accepted is not None:
                arguments = {name: value for name, value in arguments.items() if name in self._accepted}
            if self.routed is not None:
                self._replay(self.routed, call, batch, share, num_calls=len(calls))
            outputs.append(self.decoder_without_head(**arguments))
        if self.routed is not None and not torch.is_grad_enabled():
            self.routed.replay(None)  # otherwise kept for a backward pass, which may recompute activations

        hidden = torch.cat([output.last_hidden_state.flatten(0, 1) for output in outputs])  # [rows, hidden]
        rows = (
            None if share is not None else rows_of_batch(calls, [output.last_hidden_state for output in outputs], batch)
        )
        if not self.with_aux_loss:
            return hidden, rows, {}
        # [tokens, experts] per layer, concatenated over all calls
        routed = tuple(torch.cat(layer) for layer in zip(*(output.router_logits for output in outputs), strict=True))
        if share is not None:
            # The load-balancing loss depends on all tokens, so each process needs the router logits of the others.
            row = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
            held = share.held(row)
            here = share.local(row[held])
            routed = tuple(share.join(logits[here], held, len(row)) for logits in routed)
        counts, probabilities = self._router_loads(routed, calls[0].arguments["attention_mask"])
        return hidden, rows, {"expert_counts": counts, "expert_probabilities": probabilities}

    def _replay(
        self, routed: RoutedLayers, call: DecoderCall, batch: Batch, share: Share | None, *, num_calls: int
    ) -> None:
        """Choose the experts recorded in a batch in the next call of the decoder, if there are any."""
        if batch.routed_experts is None:
            routed.replay(None)
            return
        if num_calls > 1 and torch.is_grad_enabled() and self.decoder.is_gradient_checkpointing:
            raise ConfigError(
                f"--router_replay: {type(self.decoder).__name__} is computed row by row, so activations cannot be"
                " recomputed with the recorded experts",
                try_this="without --gradient_checkpointing",
            )
        places = batch_tokens(call, batch)  # [positions of the call]
        if share is not None:
            places = share.cut(torch.nn.functional.pad(places, (0, share.bounds[-1] - len(places)), value=-1))
        recorded = batch.routed_experts.flatten(0, 1)[places]  # [positions, layers, k]
        routed.replay(recorded.masked_fill((places < 0)[:, None, None], NOT_RECORDED))

    def _apply_head(
        self,
        hidden: Tensor,
        held: slice | Tensor,
        batch: Batch,
        kind: type[Outputs],
        temperature: float | Tensor,
        teacher: Teacher | None,
    ) -> dict[str, Tensor]:
        """Apply the head to hidden states [selected here, hidden]; return outputs [selected here, ...] by field."""
        if issubclass(kind, HiddenStates):
            return {"hidden": hidden}
        if issubclass(kind, Scores | Values):
            name = "scores" if issubclass(kind, Scores) else "values"
            return {name: self.scalar_head(hidden).squeeze(-1).float()}
        head = self.vocabulary_head
        if issubclass(kind, TargetLogits):
            return {"logits": head(hidden).float()}
        places = batch.places.targets[held]
        targets = batch.input_ids.flatten()[places].long()  # [targets here]
        if isinstance(temperature, Tensor):  # [rows, tokens] to [targets here]
            temperature = temperature.to(targets.device).flatten()[places]
        if issubclass(kind, LogProbsAndEntropy):
            log_probs, entropy = token_log_probs_and_entropy(hidden, targets, head, temperature=temperature)
            return {"log_probs": log_probs, "entropy": entropy}
        if issubclass(kind, DistillationTerms):
            if teacher is None:
                raise ValueError("DistillationTerms needs a teacher")
            taught = teacher.hidden[held]  # [targets here, hidden of the teacher]
            log_probs, cross = distillation_terms(hidden, taught, targets, head, teacher.head)
            return {"log_probs": log_probs, "cross": cross}
        return {"log_probs": token_log_probs(hidden, targets, head, temperature=temperature, passes=self.logit_passes)}

    def _own(self, batch: Batch, *, scores: bool) -> dict[str, Tensor]:
        """Return scores [sequences] or log-probs [rows, tokens] from the model's own forward, one sequence per call."""
        if scores:
            inputs = [call.arguments["input_ids"] for call in single_calls(batch)]  # [1, tokens] each
            return {"scores": torch.stack([self.decoder(input_ids=ids).logits.float().squeeze() for ids in inputs])}
        log_probs = torch.zeros(batch.input_ids.numel(), device=batch.input_ids.device)
        for call in single_calls(batch):
            assert call.batch_places is not None
            ids = call.arguments["input_ids"]  # [1, tokens]
            logits = self.decoder(input_ids=ids).logits.float()  # [1, tokens, vocabulary]
            found = logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])  # [tokens - 1, 1]
            log_probs[call.batch_places[1:]] = found.squeeze(-1)
        return {"log_probs": torch.where(batch.target_mask, log_probs.view_as(batch.target_mask), 0.0)}

    def _router_loads(self, router_logits: tuple[Tensor, ...], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `expert_counts` and `expert_probabilities`, see Outputs; the logits are [tokens, experts]."""
        if self.training and torch.is_grad_enabled() and not router_logits[0].requires_grad:
            raise ConfigError(
                "--aux_loss_coef has no gradient with --gradient_checkpointing_use_reentrant",
                try_this="without --gradient_checkpointing_use_reentrant",
            )
        return router_loads(router_logits, self.decoder.config.num_experts_per_tok, mask)


def share_alike(networks: Sequence[Network]) -> None:
    """Let networks share prefixes only if all of them do, so that models that are compared round the same way."""
    agreed = all(network.shares_prefixes for network in networks)
    for network in networks:
        network.shares_prefixes = agreed


def rows_of_batch(calls: Sequence[DecoderCall], outputs: Sequence[Tensor], batch: Batch) -> Tensor | None:
    """Return the row of each token of the flattened batch in the concatenated outputs [1 or more, tokens, hidden]."""
    if calls[0].batch_places is None:  # one call, in the order of the batch
        return calls[0].output_places
    rows = torch.zeros(batch.input_ids.numel(), dtype=torch.long, device=batch.input_ids.device)
    first = 0
    for call, output in zip(calls, outputs, strict=True):
        count = output.shape[0] * output.shape[1]
        places = torch.arange(count, device=rows.device) if call.output_places is None else call.output_places
        rows[call.batch_places] = first + places
        first += count
    return rows


def _shared_inputs(packed: Arguments, share: Share) -> Arguments:
    """Return the inputs for this process's tokens of a packed row.

    Padding tokens at the end of the row form a separate sequence, whose outputs are not used.
    """
    missing = share.bounds[-1] - packed["input_ids"].shape[1]
    filling = torch.arange(missing, device=packed["input_ids"].device)
    ids = torch.cat([packed["input_ids"][0], torch.zeros_like(filling)])
    positions = torch.cat([packed["position_ids"][0], filling])
    return packed | {"input_ids": share.cut(ids)[None], "position_ids": share.cut(positions)[None], "share": share}
