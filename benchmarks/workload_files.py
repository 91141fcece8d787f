"""Write the files of a workload: model, reward model, prompts and reward function.

    python benchmarks/workload_files.py W1 --folder FOLDER [--steps 4] [--tiny]

`w.py` runs this in a separate process, so that it holds no GPU memory while a driver measures. The tokenizer has one
token per letter, and a word for each row of the embedding, so that any sampled token can be decoded. The reward is a
function of the last letters: it differs between the samples of a prompt and costs nothing.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from workloads import WORKLOADS, ModelShape, Workload, find_workload

LETTERS = "abcdefghijklmnopqrstuvwxyz"
REWARD = """
def reward_func(queries, prompts, labels):
    return {"rewards": [sum(map(ord, query[-9:])) % 10 / 10 for query in queries]}
"""


def make_model(folder: Path, shape: ModelShape, *, scores: bool = False) -> None:
    """Make a model with random weights and its tokenizer; with `scores`, a reward model."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    config = Qwen2Config(**asdict(shape), eos_token_id=0, pad_token_id=1, bos_token_id=None)
    if scores:
        config.num_labels = 1
    with torch.device(device):
        model = kind.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(folder)
    make_tokenizer(shape.vocab_size).save_pretrained(folder)


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = ["</s>", "<pad>", *LETTERS]
    words += [f"<{number}>" for number in range(len(words), vocabulary)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


def make_prompts(count: int, length: int) -> list[str]:
    """Return prompts of random letters; the first ones do not depend on how many there are."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(LETTERS), (count, length), generator=generator)
    return ["".join(LETTERS[place] for place in row) for row in places.tolist()]


def read_prompts(folder: Path) -> list[str]:
    return [json.loads(line)["input"] for line in (folder / "prompts.jsonl").read_text().splitlines()]


def write_files(folder: Path, workload: Workload, steps: int) -> None:
    """Write the files that do not exist yet, and the prompts of this workload."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        make_model(folder / "model", workload.shape)
    if workload.has_critic and not (folder / "reward_model").exists():
        make_model(folder / "reward_model", workload.shape, scores=True)
    rows = make_prompts(workload.prompts * steps, workload.prompt_length)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    write_files(args.folder, find_workload(args.workload, tiny=args.tiny), args.steps)


if __name__ == "__main__":
    main()
