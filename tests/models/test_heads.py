import pytest
import torch
from networks import make_plain
from transformers import PreTrainedTokenizerFast

from openrlhf.models.heads import finishing_of, init_scalar_head, separate_pad_from_eos
from tests.tiny import CONFIGS, make_tokenizer


def test_a_new_head_begins_near_zero():
    model = make_plain("llama", scalar=True, hidden_size=1024, intermediate_size=8, num_hidden_layers=1)
    init_scalar_head(model)
    assert model.score.weight.std().item() == pytest.approx(1 / 1025, rel=0.1)
    assert abs(model.score.weight.mean().item()) < 0.2 / 1025


def test_finishing_of_each_family():
    assert finishing_of(CONFIGS["llama"]()) == (None, 1.0)
    assert finishing_of(CONFIGS["gemma2"]())[0] == 30.0
    assert finishing_of(CONFIGS["cohere"]()) == (None, 0.3)
    assert finishing_of(CONFIGS["granite"]()) == (None, 1 / 3)


def test_a_pad_token_of_its_own_is_left_alone():
    model, tokenizer = make_plain("llama", scalar=True), make_tokenizer()
    separate_pad_from_eos(model, tokenizer)
    assert tokenizer.pad_token == "<pad>"
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_a_pad_token_that_is_eos_becomes_a_new_one():
    tokenizer = make_tokenizer(pad_is_eos=True)
    size = len(tokenizer)
    model = make_plain("llama", scalar=True)
    model.resize_token_embeddings(size)
    separate_pad_from_eos(model, tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id == size
    assert model.get_input_embeddings().weight.shape[0] == size + 1


def test_a_spare_special_token_serves_as_padding():
    made = make_tokenizer(pad_is_eos=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer, eos_token="</s>", pad_token="</s>", bos_token="<"
    )
    model = make_plain("llama", scalar=True)
    before = model.get_input_embeddings().weight.shape
    separate_pad_from_eos(model, tokenizer)
    assert tokenizer.pad_token == "<"
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.get_input_embeddings().weight.shape == before


def test_the_head_of_a_tokenizer_without_padding():
    made = make_tokenizer(pad_is_eos=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, eos_token="</s>")
    model = make_plain("llama", scalar=True)
    with torch.no_grad():
        separate_pad_from_eos(model, tokenizer)
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
