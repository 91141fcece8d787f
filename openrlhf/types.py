"""The vocabulary that rooms hand to each other: frozen dataclasses, with the shape of each array beside it.

One convention holds everywhere: a mask, a log-prob or an advantage at place t belongs to token t, never to the position
that predicts it. So a prompt of two tokens with a response of three has

    input_ids    [ p0  p1  r0  r1  r2 ]
    target_mask  [ 0   0   1   1   1  ]
    log_probs    [ 0   .   a   b   c  ]   a = log p(r0 | p0 p1); the first token of a sequence has none

and nothing changes when several sequences are packed into one row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

TEMPERATURE_FACTORS = "temperature_factors"  # among a batch's extras: as a trajectory has them


@dataclass(frozen=True)
class TokenRow:
    """A sequence of a dataset, and which of its tokens are learned."""

    input_ids: NDArray[np.int32]  # [tokens]
    target_mask: NDArray[np.bool_]  # [tokens]


@dataclass(frozen=True)
class PairRow:
    """A preferred and another response to one prompt; the prompt's tokens are not targets."""

    chosen: TokenRow
    rejected: TokenRow
    margin: float = 0.0


@dataclass(frozen=True)
class LabelledRow:
    """A response with a verdict: True is desirable. `prompt_length` is where another row's response would begin."""

    tokens: TokenRow
    prompt_length: int
    label: bool


@dataclass(frozen=True)
class StepRow:
    """A text whose steps end at `step_places`, each with the probability of its positive label or a class number."""

    input_ids: NDArray[np.int32]  # [tokens]
    step_places: NDArray[np.int32]  # [steps]
    step_labels: NDArray[np.float32]  # [steps]


@dataclass(frozen=True)
class Batch:
    """Sequences side by side, padded to one length or packed into a single row.

    `sequence_ids` numbers the sequences from 0 and is -1 on padding; `position_ids` restarts with each sequence.
    """

    input_ids: Tensor  # [rows, tokens]
    position_ids: Tensor  # [rows, tokens]
    sequence_ids: Tensor  # [rows, tokens]
    target_mask: Tensor  # [rows, tokens] bool
    num_sequences: int
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # by name, [sequences] or [rows, tokens]

    def to(self, device: torch.device) -> Batch:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return replace(
            self,
            input_ids=move(self.input_ids),
            position_ids=move(self.position_ids),
            sequence_ids=move(self.sequence_ids),
            target_mask=move(self.target_mask),
            extras={name: move(tensor) for name, tensor in self.extras.items()},
        )


@dataclass(frozen=True)
class Prompt:
    """What a group of samples begins with; `index`, its row in the prompt set, tells groups of equal text apart."""

    index: int
    text: str
    input_ids: tuple[int, ...]
    label: Any = ""
    datasource: str = "default"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn, with the names that vLLM gives them."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Request:
    """One generation: tokens in."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prefix: int = 0  # requests of one number begin alike, so that they do well to meet in one cache


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """One generation: tokens out, each with its log-prob under the distribution it was drawn from.

    An engine with `whole_log_probs` gives those of the whole vocabulary even where it draws from a part of it.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    version: int  # of the weights that drew the first token


StepRewards: TypeAlias = tuple[tuple[int, float], ...]  # (place of a step's last action token, reward)


@dataclass(frozen=True)
class Trajectory:
    """A whole episode as training sees it. A two-turn one, with environment tokens e between the actions a:

    input_ids          [ p p a a e e a a ]
    action_mask        [ 0 0 1 1 0 0 1 1 ]
    rollout_log_probs  [ 0 0 . . 0 0 . . ]
    """

    prompt: Prompt
    input_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]
    rollout_log_probs: tuple[float, ...]
    reward: float
    score: float
    truncated: bool
    version: int
    extra_logs: Mapping[str, float] = field(default_factory=dict)
    step_rewards: StepRewards = ()  # of turns or reasoning steps; `reward` is their sum
    temperature_factors: tuple[float, ...] = ()  # of each token's sampling temperature on the run's; empty: all are 1
    whole_vocabulary: bool = True  # False if top_p, top_k, min_p or a penalty limited what some turn could draw
