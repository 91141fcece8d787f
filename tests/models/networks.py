"""Networks in memory, rows for them, and what a plain Transformers model computes for each row alone."""

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.data.collate import pack, pad
from openrlhf.models.attention import SEGMENTED
from openrlhf.models.forward import Network
from openrlhf.types import Batch, TokenRow
from tests.tiny import CONFIGS

VOCAB = 50
LENGTHS = (7, 12, 5)
ATTENTIONS = ("eager", "sdpa", SEGMENTED)
LAYOUTS = {"padded": lambda rows: pad(rows, 0), "packed": pack}


def make_plain(kind: str, attention: str = "eager", *, scalar: bool = False, seed: int = 0, **shape: object):
    """Return a model with weights so large that a wrong attention mask changes its outputs visibly."""
    torch.manual_seed(seed)
    config = CONFIGS[kind](vocab_size=VOCAB, initializer_range=0.2, pad_token_id=0, **shape)
    if scalar:
        config.num_labels = 1
    auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=attention)


def make_network(kind: str, attention: str, *, with_aux_loss: bool = False, **options: object) -> Network:
    return Network(make_plain(kind, attention, **options), with_aux_loss=with_aux_loss)


def make_rows(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0, prompt: int = 2) -> list[TokenRow]:
    random = np.random.default_rng(seed)
    return [
        TokenRow(random.integers(1, VOCAB, length).astype(np.int32), np.arange(length) >= prompt) for length in lengths
    ]


def changed(row: TokenRow) -> TokenRow:
    """Return the row with every token replaced."""
    return TokenRow(1 + (row.input_ids + 7) % (VOCAB - 1), row.target_mask)


def alone(row: TokenRow) -> Tensor:
    return torch.from_numpy(row.input_ids).long()[None]


def plain_log_probs(model, row: TokenRow, temperature: float = 1.0) -> Tensor:
    """log p of each token after the first: [tokens - 1]."""
    ids = alone(row)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)


def per_row(values: Tensor, batch: Batch) -> list[Tensor]:
    """Split [rows, tokens] into one tensor per sequence, in any layout of the batch."""
    return [values[batch.sequence_ids == number] for number in range(batch.num_sequences)]


def gradients(network: Network) -> dict[str, Tensor]:
    """Return gradients by name, and clear them."""
    found = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    network.zero_grad(set_to_none=True)
    return found
