import pytest
import torch
from networks import make_plain
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

from openrlhf.models.heads import (
    VocabularyHead,
    finished_logits,
    init_scalar_head,
    logit_factor,
    separate_pad_from_eos,
)
from tests.tiny import make_tokenizer


def test_a_new_head_starts_near_zero():
    model = make_plain("llama", scalar=True, hidden_size=1024, intermediate_size=8, num_hidden_layers=1)
    init_scalar_head(model)
    assert model.score.weight.std().item() == pytest.approx(1 / 1025, rel=0.1)
    assert abs(model.score.weight.mean().item()) < 0.2 / 1025


@pytest.mark.parametrize(("kind", "factor"), [("llama", 1.0), ("cohere", 0.3), ("granite", 1 / 3), ("gemma2", None)])
def test_the_logit_factor_is_found_by_probing_the_model(kind, factor):
    model = make_plain(kind)
    found = logit_factor(model)
    assert found == (factor if factor is None else pytest.approx(factor))
    ids = torch.arange(1, 9)[None]
    hidden = model.base_model(input_ids=ids).last_hidden_state
    expected = model(input_ids=ids).logits[0]
    torch.testing.assert_close(VocabularyHead(model, found)(hidden[0]), expected)
    torch.testing.assert_close(finished_logits(model, hidden)[0], expected)


def test_probing_needs_no_weights_and_restores_the_model():
    model = make_plain("cohere")
    before = dict(model.named_modules())
    with torch.device("meta"):
        bare = type(model)(model.config)
    bare.model.rotary_emb = model.model.rotary_emb
    assert logit_factor(bare.to_empty(device="cpu")) == pytest.approx(0.3)
    logit_factor(model)
    assert dict(model.named_modules()) == before


def test_a_decoder_within_the_decoder_is_found():
    """OPT's own forward calls `self.model.decoder`, past the module that `base_model` names."""
    shape = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "dropout": 0.0}
    model = OPTForCausalLM(OPTConfig(vocab_size=50, word_embed_proj_dim=32, pad_token_id=0, **shape)).eval()
    assert logit_factor(model) == 1.0


def test_a_separate_pad_token_is_kept():
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
