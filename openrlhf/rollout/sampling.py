"""Drawing tokens: each request by its own parameters and its own stream of chance, whoever shares the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.types import SamplingParams


@dataclass
class Draws:
    """Sampling parameters and random numbers of the running rows."""

    temperature: Tensor  # [rows]
    top_p: Tensor  # [rows]
    top_k: Tensor  # [rows]; the vocabulary size where there is no limit
    min_p: Tensor  # [rows]
    uniforms: Tensor  # [rows, most tokens]: one number in [0, 1) for each token that may be drawn

    @staticmethod
    def of(params: Sequence[SamplingParams], vocabulary: int, device: torch.device) -> Draws:
        longest = max(item.max_tokens for item in params)
        uniforms = torch.zeros(len(params), longest)
        for row, item in enumerate(params):
            stream = torch.Generator().manual_seed(item.seed)
            uniforms[row, : item.max_tokens] = torch.rand(item.max_tokens, generator=stream)

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return Draws(
            temperature=column([item.temperature for item in params]),
            top_p=column([item.top_p for item in params]),
            top_k=column([item.top_k if item.top_k > 0 else vocabulary for item in params]).long(),
            min_p=column([item.min_p for item in params]),
            uniforms=uniforms.to(device),
        )

    def rows(self, keep: Tensor) -> Draws:
        return Draws(*(tensor[keep] for tensor in vars(self).values()))

    def joined(self, other: Draws) -> Draws:
        longest = max(self.uniforms.shape[1], other.uniforms.shape[1])
        wide = [torch.nn.functional.pad(item.uniforms, (0, longest - item.uniforms.shape[1])) for item in (self, other)]
        return Draws(
            temperature=torch.cat([self.temperature, other.temperature]),
            top_p=torch.cat([self.top_p, other.top_p]),
            top_k=torch.cat([self.top_k, other.top_k]),
            min_p=torch.cat([self.min_p, other.min_p]),
            uniforms=torch.cat(wide),
        )


def draw(logits: Tensor, draws: Draws, places: Tensor, *, whole: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(token, its log-prob under the distribution it was drawn from) for each row of [rows, vocabulary].

    `places` [rows] says which of its random numbers a row uses. Temperature 0 takes the likeliest token, at log-prob 0.
    Given `whole`, the logits before anything was forbidden or penalised, the log-prob is theirs, without truncation.
    """
    greedy = draws.temperature == 0
    temperature = torch.where(greedy, 1.0, draws.temperature)[:, None]
    log_probs = truncate((logits.float() / temperature).log_softmax(-1), draws)
    uniform = draws.uniforms.gather(1, places.clamp(max=draws.uniforms.shape[1] - 1)[:, None])
    cumulative = log_probs.double().exp().cumsum(-1)
    # The first token whose cumulative probability passes the random number; never one of probability zero.
    drawn = torch.searchsorted(cumulative, uniform.double() * cumulative[:, -1:], right=True).squeeze(1)
    tokens = torch.where(greedy, log_probs.argmax(-1), drawn.clamp(max=logits.shape[-1] - 1))
    told = log_probs if whole is None else (whole.float() / temperature).log_softmax(-1)
    chosen = told.gather(1, tokens[:, None]).squeeze(1)
    return tokens, torch.where(greedy, 0.0, chosen)


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits [vocabulary] with tokens that already stand there made less likely (CTRL, arXiv 1909.05858, eq. 2)."""
    before = logits[seen]
    return logits.index_put((seen,), torch.where(before > 0, before / penalty, before * penalty))


def truncate(log_probs: Tensor, draws: Draws) -> Tensor:
    """The distribution within min-p, top-k and top-p, normalised again; untouched where none of them limits.

    As in vLLM, top-p counts the mass of what the other two leave.
    """
    vocabulary = log_probs.shape[-1]
    if bool(((draws.top_p >= 1) & (draws.top_k >= vocabulary) & (draws.min_p <= 0)).all()):
        return log_probs
    ranked, order = log_probs.sort(-1, descending=True)
    probs = ranked.exp()
    kept = probs >= draws.min_p[:, None] * probs[:, :1]
    kept &= torch.arange(vocabulary, device=log_probs.device)[None] < draws.top_k[:, None]
    left = probs * kept
    before = left.cumsum(-1) - left  # mass of the likelier tokens
    kept &= before < draws.top_p[:, None] * left.sum(-1, keepdim=True)
    ranked = ranked.masked_fill(~kept, -torch.inf)
    back = torch.full_like(log_probs, -torch.inf).scatter(1, order, ranked)
    return back.log_softmax(-1)
