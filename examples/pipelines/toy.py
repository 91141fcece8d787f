"""A model and data small enough to try every pipeline on a laptop: words of early letters (a to m) are good answers.

    python examples/pipelines/toy.py --folder toy

The model has random weights and one token per character. The commands in docs/guides.md read these rows.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

EARLY, LATE = "abcdefghijklm", "nopqrstuvwxyz"
CHARACTERS = f"{EARLY}{LATE}0123456789=#+-.<>_: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("toy"))
    folder: Path = parser.parse_args().folder
    disable_progress_bar()
    build_model(folder / "base")
    for name, rows in write_rows(random.Random(0)).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{folder}: a model in base, and rows in " + ", ".join(sorted(path.name for path in folder.glob("*.jsonl"))))


def write_rows(chance: random.Random) -> dict[str, list[dict[str, Any]]]:
    def word(letters: str = EARLY + LATE) -> str:
        return "".join(chance.choice(letters) for _ in range(chance.randint(2, 6)))

    def steps() -> str:
        return "".join(letter + "#" for letter in word())

    def verdicts(text: str) -> list[str]:
        return ["+" if letter in EARLY else "-" for letter in text[::2]]

    return {
        "sft": [{"input": word(), "output": word()} for _ in range(1024)],
        "pairs": [{"prompt": word(), "chosen": word(EARLY), "rejected": word(LATE)} for _ in range(512)],
        "prompts": [{"input": word()} for _ in range(512)],
        "held_out": [{"input": word()} for _ in range(128)],
        "texts": [{"text": f"{word()}={word(EARLY)} {word()}={word(EARLY)}"} for _ in range(512)],
        "step_answers": [{"input": word(), "output": steps()} for _ in range(1024)],
        "step_labels": [{"input": text, "label": verdicts(text)} for text in (steps() for _ in range(1024))],
    }


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **more: Any) -> list[float]:
    """The true reward of answers in steps: 1 if each step is one early letter, 0 otherwise."""

    def worth(answer: str) -> float:
        *steps, unfinished = answer.removesuffix("</s>").split("#")
        return float(bool(steps) and not unfinished and set(steps) <= set(EARLY))

    return [worth(query.removeprefix(prompt)) for query, prompt in zip(queries, prompts, strict=True)]


def build_model(folder: Path) -> None:
    """A decoder with heads wide enough for vLLM on a CPU, and a tokenizer of characters."""
    vocabulary = {token: number for number, token in enumerate(["</s>", "<pad>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
