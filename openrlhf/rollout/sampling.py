"""Token sampling with separate parameters and random numbers for each request of a batch.

`HFEngine` keeps a `SamplingState` for its running rows and calls `sample_tokens` for each new token:

    logits  ->  penalties and forbidden tokens (in hf.py)  ->  / temperature  ->  min-p, top-k, top-p  ->  token

The random numbers of a row are drawn when it starts, one for each token that it may sample, so its tokens depend only
on its logits and its seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from openrlhf.types import SamplingParams


@dataclass
class SamplingState:
    """Sampling parameters and random numbers of the running rows."""

    temperature: Tensor  # [rows]; 0: take the most likely token
    top_p: Tensor  # [rows]
    top_k: Tensor  # [rows]; the size of the vocabulary if there is no limit
    min_p: Tensor  # [rows]
    uniforms: Tensor  # [rows, max tokens]: a random number in [0, 1) for each token

    @staticmethod
    def of(params: Sequence[SamplingParams], vocabulary: int, device: torch.device) -> SamplingState:
        """Create the state of new rows; the seed of each request determines its random numbers."""
        longest = max(item.max_tokens for item in params)
        uniforms = torch.zeros(len(params), longest)
        for row, item in enumerate(params):
            stream = torch.Generator().manual_seed(item.seed)
            uniforms[row, : item.max_tokens] = torch.rand(item.max_tokens, generator=stream)
        numbers = torch.tensor(
            [[item.temperature, item.top_p, item.min_p] for item in params], dtype=torch.float32, device=device
        )
        top_k = torch.tensor([item.top_k if item.top_k > 0 else vocabulary for item in params], device=device)
        temperature, top_p, min_p = numbers.unbind(1)  # [rows] each
        return SamplingState(temperature, top_p, top_k, min_p, uniforms.to(device))

    def rows(self, keep: Tensor) -> SamplingState:
        """Return the state of the rows with the given indices."""
        return SamplingState(*(tensor[keep] for tensor in vars(self).values()))

    def joined(self, other: SamplingState) -> SamplingState:
        """Return these rows followed by those of `other`."""
        longest = max(self.uniforms.shape[1], other.uniforms.shape[1])
        wide = [replace(one, uniforms=pad(one.uniforms, (0, longest - one.uniforms.shape[1]))) for one in (self, other)]
        pairs = zip(*(vars(one).values() for one in wide), strict=True)
        return SamplingState(*(torch.cat(pair) for pair in pairs))


def sample_tokens(
    logits: Tensor, state: SamplingState, places: Tensor, *, whole: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample a token for each row of logits [rows, vocabulary]; return (tokens, log-probs), each [rows].

    Log-probs are those of the sampling distribution. `places` [rows] selects the random number that each row uses. With
    temperature 0, the most likely token is taken, with log-prob 0. If `whole`, the logits before tokens were forbidden
    or penalised, is given, log-probs are computed from it without truncation.
    """
    greedy = state.temperature == 0  # [rows]
    temperature = torch.where(greedy, 1.0, state.temperature)[:, None]  # [rows, 1]
    log_probs = (logits.float() / temperature).log_softmax(-1)  # [rows, vocabulary]
    limited = (state.min_p > 0) | (state.top_k < logits.shape[-1]) | (state.top_p < 1)  # [rows]
    if bool(limited.any()):
        log_probs = truncate(log_probs, state)
    uniform = state.uniforms.gather(1, places.clamp(max=state.uniforms.shape[1] - 1)[:, None])  # [rows, 1]
    cumulative = log_probs.double().exp().cumsum(-1)  # [rows, vocabulary]
    # Take the first token whose cumulative probability exceeds the random number; its probability is never zero.
    sampled = torch.searchsorted(cumulative, uniform.double() * cumulative[:, -1:], right=True).squeeze(1)  # [rows]
    tokens = torch.where(greedy, log_probs.argmax(-1), sampled.clamp(max=logits.shape[-1] - 1))  # [rows]
    reported = log_probs if whole is None else (whole.float() / temperature).log_softmax(-1)  # [rows, vocabulary]
    chosen = reported.gather(1, tokens[:, None]).squeeze(1)  # [rows]
    return tokens, torch.where(greedy, 0.0, chosen)


def truncate(log_probs: Tensor, state: SamplingState) -> Tensor:
    """Truncate log-probs [rows, vocabulary] by min-p, top-k and top-p, and normalise them again.

    As in vLLM, top-p is applied after min-p and top-k.
    """
    ranked, order = log_probs.sort(-1, descending=True)  # [rows, vocabulary], like all tensors below
    probs = ranked.exp()
    kept = probs >= state.min_p[:, None] * probs[:, :1]
    kept &= torch.arange(log_probs.shape[-1], device=log_probs.device)[None] < state.top_k[:, None]
    left = probs * kept
    before = left.cumsum(-1) - left  # total probability of more likely tokens
    kept &= before < state.top_p[:, None] * left.sum(-1, keepdim=True)
    ranked = ranked.masked_fill(~kept, -torch.inf)
    back = torch.full_like(log_probs, -torch.inf).scatter(1, order, ranked)
    return back.log_softmax(-1)
