"""Data types shared by all packages: frozen dataclasses, with the shape of each array next to its field.

Dataset rows (TokenRow, PairRow, ...) are collated into batches for training, one kind of batch for each kind of row.
In RL, an engine answers a Request with a Completion, a finished episode becomes a Trajectory, and the trajectories of
a rollout become PolicyBatches for training. From the engine on, a sample is arrays, because millions of tokens pass
through the controller; reward functions and agents get lists of Python numbers (`agents/interface.py`). Completions and
trajectories are equal only if they are the same object.

One convention holds everywhere: the mask, log-prob or advantage at index t belongs to token t, not to the position
that predicts it. For a prompt of two tokens and a response of three:

    input_ids    [ p0  p1  r0  r1  r2 ]
    target_mask  [ 0   0   1   1   1  ]
    log_probs    [ 0   .   a   b   c  ]   a = log p(r0 | p0 p1); the first token has no log-prob

The same holds for each sequence of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True)
class TokenRow:
    """A tokenised dataset sequence and the mask of the tokens to train on."""

    input_ids: NDArray[np.int32]  # [tokens]
    target_mask: NDArray[np.bool_]  # [tokens]


@dataclass(frozen=True)
class PairRow:
    """A preferred and a rejected response to the same prompt; prompt tokens are not targets."""

    chosen: TokenRow
    rejected: TokenRow
    margin: float = 0.0


@dataclass(frozen=True)
class LabelledRow:
    """A response labelled desirable (True) or undesirable (False).

    `prompt_length` separates prompt and response, so that KTO can pair a prompt with another row's response.
    """

    tokens: TokenRow
    prompt_length: int
    label: bool


@dataclass(frozen=True)
class StepRow:
    """Text with labelled reasoning steps.

    Step i ends at index `step_places[i]`; `step_labels[i]` is the probability of its positive label, or a class index.
    """

    input_ids: NDArray[np.int32]  # [tokens]
    step_places: NDArray[np.int32]  # [steps]
    step_labels: NDArray[np.float32]  # [steps]


@dataclass(frozen=True, kw_only=True)
class SharedPrefixes:
    """A row that holds each prefix shared by several sequences once; see `data.shared_prefixes`.

    Bounds are cumulative lengths, int32, as attention kernels expect them; so are `kept` and `places`, to send less.
    """

    kept: Tensor  # [row]: index in the concatenated sequences of the token at each place of the row
    places: Tensor  # [tokens]: the place in the row of each token of the concatenated sequences
    segment_bounds: Tensor  # [segments + 1]: bounds of prefixes, continuations and other sequences in the row
    prefix_bounds: Tensor  # [prefixes + 1]: bounds of the prefixes, which come first
    continuation_bounds: Tensor  # [prefixes + 1]: bounds of their continuations, counted from the end of the prefixes
    longest_sequence: int
    longest_segment: int
    longest_prefix: int
    longest_continuation: int
    num_prefix_tokens: int
    num_continuation_tokens: int


@dataclass(frozen=True, kw_only=True)
class TokenPlaces:
    """The places in the flattened batch that a network needs; `Batch.places` derives them."""

    tokens: Tensor  # [tokens]: all places except padding
    starts: Tensor  # [sequences]: indices in `tokens` at which the sequences start
    targets: Tensor  # [targets]
    last: Tensor  # [sequences]: the last token of each sequence
    longest: int  # tokens of the longest sequence


Kind = TypeVar("Kind", bound="Batch")
Tensors = TypeVar("Tensors", bound="Batch | SharedPrefixes | TokenPlaces")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Several sequences as tensors, padded to one length or packed into a single row.

    Positions and numbers of the sequences are derived from their lengths, so a batch carries only ids, masks and values
    to another process. A filler is a copy of another batch for a rank with fewer micro-batches than the others. It is
    computed, because sharded models run on all ranks together, but its results are ignored.
    """

    input_ids: Tensor  # [rows, tokens]; int64 on a device, int32 before
    lengths: Tensor  # [sequences]
    target_mask: Tensor  # [rows, tokens] bool
    filler: bool = False
    prefixes: SharedPrefixes | None = None  # if sequences share prefixes; networks may compute each of them once
    routed_experts: Tensor | None = None  # [rows, tokens, layers, k] int16, see Completion; -1 on padding

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @cached_property
    def position_ids(self) -> Tensor:
        """The place of each token in its sequence, from 0; 0 on padding: [rows, tokens]."""
        import torch

        places = torch.arange(self.input_ids.shape[1], device=self.lengths.device)
        if len(self.input_ids) == self.num_sequences:  # padded
            return torch.where(places < self.lengths[:, None], places, 0)
        starts = self.lengths.cumsum(0) - self.lengths
        return (places - starts.repeat_interleave(self.lengths, output_size=len(places)))[None]

    @cached_property
    def sequence_ids(self) -> Tensor:
        """The number of each token's sequence, from 0; -1 on padding: [rows, tokens]."""
        import torch

        numbers, count = torch.arange(self.num_sequences, device=self.lengths.device), self.input_ids.shape[1]
        if len(self.input_ids) == self.num_sequences:  # padded
            places = torch.arange(count, device=self.lengths.device)
            return torch.where(places < self.lengths[:, None], numbers[:, None], -1)
        return numbers.repeat_interleave(self.lengths, output_size=count)[None]

    @cached_property
    def places(self) -> TokenPlaces:
        """Places of tokens, targets and the ends of sequences.

        The number of places depends on the contents of the batch. The host would have to wait for a device to count
        them, so `to` derives the places before it moves a batch.
        """
        numbers, positions = self.sequence_ids.flatten(), self.position_ids.flatten()  # [rows x tokens] each
        tokens = (numbers >= 0).nonzero().squeeze(-1)
        last = numbers.new_zeros(self.num_sequences).scatter_reduce(0, numbers[tokens], tokens, reduce="amax")
        return TokenPlaces(
            tokens=tokens,
            starts=(positions[tokens] == 0).nonzero().squeeze(-1),
            targets=self.target_mask.flatten().nonzero().squeeze(-1),
            last=last,
            longest=int(positions.max()) + 1,
        )

    def as_kind(self, kind: type[Kind], **more: object) -> Kind:
        """Return this batch as a kind of batch with `more` fields."""
        names = {item.name for item in fields(self)}
        given: dict[str, Any] = {name: vars(self)[name] for name in names} | more
        made = kind(**given)
        vars(made).update({name: value for name, value in vars(self).items() if name not in names})  # derived already
        return made

    def to(self, device: torch.device) -> Self:
        """Return a copy on `device`."""
        moved = move(self, device)
        prefixes = None if self.prefixes is None else move(self.prefixes, device)
        moved = replace(moved, input_ids=moved.input_ids.long(), prefixes=prefixes)
        derived = {name: getattr(self, name).to(device, non_blocking=True) for name in ("position_ids", "sequence_ids")}
        vars(moved).update(derived, places=move(self.places, device))
        return moved

    def __getstate__(self) -> dict[str, object]:
        """Pickle the fields only; the receiver derives the rest."""
        return {item.name: vars(self)[item.name] for item in fields(self)}


def move(data: Tensors, device: torch.device) -> Tensors:
    """Return a copy with all tensors on `device`; transfers are asynchronous if memory is pinned."""
    from torch import Tensor

    found = {item.name: value for item in fields(data) if isinstance(value := vars(data)[item.name], Tensor)}
    return replace(data, **{name: tensor.to(device, non_blocking=True) for name, tensor in found.items()})


@dataclass(frozen=True, kw_only=True)
class PairBatch(Batch):
    """B pairs of responses: the chosen ones are sequences 0 to B-1, the rejected ones B to 2B-1."""

    margin: Tensor  # [pairs]: how much better the chosen response is; 0 if the data has no margins


@dataclass(frozen=True, kw_only=True)
class LabelledBatch(Batch):
    """Responses with one label each."""

    label: Tensor  # [sequences] bool: desirable or not


@dataclass(frozen=True, kw_only=True)
class StepBatch(Batch):
    """Texts with labelled reasoning steps."""

    step_labels: Tensor  # [rows, tokens]: NaN except at the last token of a step


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(Batch):
    """Rollout samples to score."""

    temperature_factors: Tensor | None = None  # [rows, tokens], see Trajectory; None means all 1


@dataclass(frozen=True, kw_only=True)
class PolicyBatch(RolloutBatch):
    """Rollout samples to train the policy and the critic on; all tensors are [rows, tokens]."""

    advantages: Tensor
    rollout_log_probs: Tensor  # computed by the engine during sampling
    old_log_probs: Tensor | None = None  # the policy's, before training on this rollout; None: use current ones
    reference_log_probs: Tensor | None = None
    old_values: Tensor | None = None  # the critic's, before training on this rollout
    returns: Tensor | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt, shared by all samples of a group.

    `index` is the row in the prompt set; it distinguishes groups whose prompts have the same text.
    """

    index: int
    text: str
    input_ids: tuple[int, ...]
    label: object = ""
    datasource: str = "default"


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request, named as in vLLM."""

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
    """Input to one generation."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prefix: int = 0  # requests with the same id share a prompt; route them to the same prefix cache
    episode: int | None = None  # requests with the same id continue each other; route them to the same cache


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, eq=False)
class Completion:
    """Output of one generation: tokens with their log-probs under the sampling distribution.

    An engine with `whole_log_probs` reports log-probs over the whole vocabulary even if sampling is truncated.
    """

    token_ids: NDArray[np.int32]  # [tokens]
    log_probs: NDArray[np.float32]  # [tokens]
    text: str
    finish_reason: FinishReason
    version: int  # version of the weights that sampled the first token
    token_versions: NDArray[np.int32]  # [tokens]: version of the weights that sampled each token
    # [tokens of the prompt and the completion but the last one, layers, k]: experts that a mixture of experts chose
    routed_experts: NDArray[np.int16] | None = None

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        text: str,
        finish_reason: FinishReason,
        version: int,
    ) -> Self:
        """Make a completion of lists or tuples, with all tokens sampled by the same weights."""
        import numpy as np

        tokens, values = np.array(token_ids, dtype=np.int32), np.array(log_probs, dtype=np.float32)
        return cls(tokens, values, text, finish_reason, version, np.full(len(tokens), version, dtype=np.int32))


NOT_RECORDED = -1  # in place of an expert's number: the engine did not report the experts of this token
NOT_SAMPLED = -1  # version of a token that is part of a prompt or comes from the environment
StepRewards: TypeAlias = tuple[tuple[int, float], ...]  # (index of a step's last action token, reward)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A complete episode, or one of its trajectories if `episode` is set, ready for training.

    Example with two turns: p are prompt tokens, a action tokens and e environment tokens. The weights changed from
    version 4 to 5 during the second turn.

    input_ids          [  p  p  a  a  e  e  a  a ]
    action_mask        [  0  0  1  1  0  0  1  1 ]
    rollout_log_probs  [  0  0  .  .  0  0  .  . ]
    token_versions     [ -1 -1  4  4 -1 -1  4  5 ]

    The reward is the training signal; the score is used for dynamic filtering. If reward models score the episode, both
    are NaN until then.
    """

    prompt: Prompt
    input_ids: NDArray[np.int32]  # [tokens]
    action_mask: NDArray[np.bool_]  # [tokens]
    rollout_log_probs: NDArray[np.float32]  # [tokens]
    token_versions: NDArray[np.int32]  # [tokens]: version of the weights that sampled each token, or NOT_SAMPLED
    reward: float
    score: float
    truncated: bool  # the last turn or the episode was cut off by a limit
    version: int  # version of the oldest weights that sampled a turn
    extra_logs: Mapping[str, float] = field(default_factory=dict)
    step_rewards: StepRewards = ()  # per turn or reasoning step; `reward` is their sum
    temperature_factors: NDArray[np.float32] | None = None  # [tokens]: sampling temperature / --temperature; None: 1
    routed_experts: NDArray[np.int16] | None = None  # [tokens, layers, k], see Completion; -1 if not reported
    whole_vocabulary: bool = True  # False if the engine's log-probs of any turn exclude or penalise tokens
    episode: int | None = None  # equal for the trajectories of an episode with several of them, which share its reward
