"""Tiny models and data for every script of examples/scripts, under the names that the scripts expect."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from transformers.utils.logging import disable_progress_bar

ROWS = 16
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CHARACTERS = f"{LETTERS}ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789=#+-.<>/_: \n"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SHAPE = dict(  # heads wide enough for vLLM's attention on a CPU
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)
CONFIGS = {
    "llama": lambda **more: LlamaConfig(**SHAPE, **more),
    "mistral": lambda **more: MistralConfig(**SHAPE, **more),
    "mixtral": lambda **more: MixtralConfig(**SHAPE, num_local_experts=4, **more),
    "qwen_moe": lambda **more: Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **more
    ),
}
REWARD = f"""
def reward_func(queries, prompts, labels, **kwargs):
    answers = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    shares = [(1 + sum(letter in "{LETTERS}" for letter in answer)) / (2 + len(answer)) for answer in answers]
    return {{"rewards": shares, "scores": shares}}
"""


def make_toys(folder: Path) -> None:
    disable_progress_bar()
    tokenizer = make_tokenizer()
    for kind in CONFIGS:
        save_model(folder / kind, tokenizer, CONFIGS[kind], AutoModelForCausalLM)
    save_model(folder / "reward", tokenizer, CONFIGS["llama"], AutoModelForSequenceClassification, num_labels=1)
    for name, rows in make_rows(random.Random(0)).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    vocabulary = {token: number for number, token in enumerate(["</s>", "<pad>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_model(folder: Path, tokenizer: PreTrainedTokenizerFast, config: Any, kind: Any, **more: int) -> None:
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    kind.from_config(config(vocab_size=len(tokenizer), **ids, **more)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_rows(chance: random.Random) -> dict[str, list[dict[str, Any]]]:
    """Write rows that have the fields of every script that may read them, under the default names."""

    def word() -> str:
        return "".join(chance.choice(LETTERS) for _ in range(chance.randint(2, 6)))

    def asked(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    def pair() -> dict[str, Any]:
        question = asked(word())
        return {side: [*question, {"role": "assistant", "content": word()}] for side in ("chosen", "rejected")}

    def answer(number: int) -> dict[str, Any]:
        return {"question": word(), "instruction": word(), "response": word(), "text": word(), "score": number % 2}

    def prompt() -> dict[str, Any]:
        number = str(chance.randint(0, 9))
        text = word()
        names = {"question": text, "context_messages": asked(text), "prompt": asked(text)}
        return names | {"answer": number, "label": number}

    return {
        "answers": [answer(number) for number in range(ROWS)],
        "pairs": [pair() for _ in range(ROWS)],
        "steps": [{"input": f"{word()}#{word()}#", "value": ["+", "-"]} for _ in range(ROWS)],
        "prompts": [prompt() for _ in range(ROWS)],
    }
