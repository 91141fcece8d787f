"""Tiny models whose tokenizers are of the kinds that GGUF files know: byte-level BPE and SentencePiece BPE."""

import json

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.tiny import CONFIGS

TEXT = ["the cat sat on the mat", "that hat is on the cat", "12 and 34 make 46", "Über naïve cafés, isn't it?\n\n  yes"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def split_by(expression):
    """Return the pre-tokenizer of a byte-level tokenizer that splits text by this expression."""
    steps = [
        pre_tokenizers.Split(Regex(expression), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps)


def byte_level_tokenizer(pre_tokenizer=None):
    """Return a byte-level BPE tokenizer with ChatML, trained on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = CHATML
    return wrapped


def sentencepiece_tokenizer():
    """Return a BPE tokenizer like those converted from SentencePiece: spaces are ▁, and unknown bytes are tokens."""
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    symbols = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=symbols, show_progress=False)
    tokenizer.train_from_iterator(TEXT[:3], trainer)
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = parts["added_tokens"][: len(special)]  # bytes are ordinary tokens
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def make_byte_model(folder, kind="llama", *, tokenizer=None, spare=5, **shape):
    """Write a model with random weights and a tokenizer of these kinds; return its path.

    The model has `spare` more embeddings than the tokenizer has tokens, as published models do.
    """
    tokenizer = tokenizer or byte_level_tokenizer()
    torch.manual_seed(0)
    config = CONFIGS[kind](
        vocab_size=len(tokenizer) + spare,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # larger than by default, so that a misplaced tensor shows
            weight.mul_(1 if "norm" in name else 8).add_(torch.randn_like(weight), alpha=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
