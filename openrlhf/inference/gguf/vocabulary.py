"""A fast tokenizer in llama.cpp's terms: tokens with their types, and the rules that split text.

llama.cpp has its own implementation of each kind of tokenizer, and a file only names it. Two kinds are recognised here:

- byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): `gpt2`, with the merges and the name of the rule that splits text into
  words. The name is found from the splitting expression in the tokenizer; an unknown one is rejected, since a wrong
  rule would silently give other tokens.
- SentencePiece BPE with byte fallback (Llama 2, Mistral, Gemma): `llama`, with a score per token. The higher the score
  of its result, the earlier a merge happens, so the scores follow from the order of the merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypeAlias, TypedDict

from transformers import PreTrainedTokenizerBase

from openrlhf.errors import ConfigError
from openrlhf.inference.gguf.families import CONVERTER

if TYPE_CHECKING:
    from gguf import GGUFWriter, TokenType

# Parts of the regular expressions with which byte-level tokenizers split text.
CONTRACTIONS, WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Regular expression of a byte-level tokenizer -> llama.cpp's name for it.
SPLITS = {
    rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{REST}": "llama-bpe",
    rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{REST}": "qwen2",
}
# A step of the normalizer or pre-tokenizer in tokenizer.json; its keys depend on its type.
Step: TypeAlias = Mapping[str, Any]


class BPEModel(TypedDict):
    """`model` in tokenizer.json; types other than BPE have other keys."""

    type: str
    vocab: Mapping[str, int]
    merges: Sequence[Sequence[str]]
    byte_fallback: NotRequired[bool]
    unk_token: NotRequired[str | None]


class TokenizerFile(TypedDict):
    """The parts of tokenizer.json that are read here."""

    model: BPEModel
    normalizer: Step | None
    pre_tokenizer: Step | None


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a GGUF file."""

    model: str  # llama.cpp's name of the algorithm
    pre: str  # llama.cpp's name of the rule that splits text
    tokens: Sequence[str]  # one per row of the embeddings
    types: Sequence[TokenType]
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    space_prefix: bool | None = None  # whether text gets a space at its start; None for byte-level tokenizers

    def add_to(self, writer: GGUFWriter) -> None:
        """Write the vocabulary into the metadata of a file."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.space_prefix is not None:
            writer.add_add_space_prefix(self.space_prefix)


def read_vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
    """Describe a tokenizer for a model with `size` embeddings; raise if llama.cpp would tokenise differently."""
    backend: Any = tokenizer  # fast tokenizers have `backend_tokenizer`
    parts: TokenizerFile = json.loads(backend.backend_tokenizer.to_str())
    model = parts["model"]
    if model["type"] != "BPE":
        raise ConfigError(
            f"--gguf cannot write a tokenizer of the type {model['type']}: expected BPE", try_this=CONVERTER
        )
    tokens, types = tokens_and_types(parts["model"], tokenizer, size)
    merges = [(left, right) for left, right in model["merges"]]
    if model.get("byte_fallback"):
        scores = merge_scores(tokens, merges)
        return Vocabulary("llama", "default", tokens, types, scores=scores, space_prefix=has_space_prefix(parts))
    return Vocabulary(
        "gpt2", split_rule(parts["pre_tokenizer"]), tokens, types, merges=[" ".join(pair) for pair in merges]
    )


def tokens_and_types(
    model: BPEModel, tokenizer: PreTrainedTokenizerBase, size: int
) -> tuple[list[str], list[TokenType]]:
    """Return all tokens by id; ids without a token, which pad the embeddings, are marked as unused."""
    from gguf import TokenType

    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [TokenType.UNUSED] * size
    plain, added = model["vocab"], tokenizer.added_tokens_decoder
    largest = max([*plain.values(), *added])
    if largest >= size:
        raise ConfigError(f"the tokenizer has a token with the id {largest}, but the model has {size} embeddings")
    for token, number in plain.items():
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        byte = is_byte and model.get("byte_fallback")
        tokens[number], types[number] = token, TokenType.BYTE if byte else TokenType.NORMAL
    for number, token in added.items():
        tokens[number], types[number] = token.content, TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    unknown = model.get("unk_token")
    if unknown in plain:
        types[plain[unknown]] = TokenType.UNKNOWN
    return tokens, types


def split_rule(pre_tokenizer: Step | None) -> str:
    """Return llama.cpp's name of the rule by which a byte-level tokenizer splits text into words."""
    steps: list[Step] = []
    if pre_tokenizer is not None:
        steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0]["use_regex"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1]["use_regex"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1]["use_regex"]:
        rule = SPLITS.get(steps[0]["pattern"].get("Regex", ""))
        if rule is not None:
            return rule
    raise ConfigError(
        f"--gguf does not know how llama.cpp splits text for this tokenizer ({', '.join(kinds) or 'no rule'})",
        try_this=CONVERTER,
    )


def merge_scores(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Return a score per token: minus the rank of the first merge that makes it; other tokens come last."""
    rank: dict[str, int] = {}
    for place, (left, right) in enumerate(merges):
        rank.setdefault(left + right, place)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def has_space_prefix(parts: TokenizerFile) -> bool:
    """Return whether a SentencePiece tokenizer puts a space before the text."""
    steps = parts["pre_tokenizer"] or {}
    if steps.get("type") == "Metaspace":
        return steps.get("prepend_scheme", "always") != "never"
    normalizer = parts["normalizer"] or {}
    return any(step.get("type") == "Prepend" for step in normalizer.get("normalizers", [normalizer]))
