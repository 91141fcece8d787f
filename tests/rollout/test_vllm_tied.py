"""An output head that is the embedding: its weights are sent once and take effect in both places.

These tests share one engine in their own file, because vLLM keeps one set of process groups per process.
"""

import pytest

from openrlhf.errors import RolloutError
from openrlhf.rollout import vllm_layers
from tests.rollout.vllm_engines import ATTENTION
from tests.rollout.vllm_pairs import built, change, gap, gaps_after_every_load, send

pytestmark = pytest.mark.slow(seconds=4)


@pytest.fixture(scope="module")
def tied(tmp_path_factory, tokenizer):
    with built("llama", ATTENTION | {"tie_word_embeddings": True}, tmp_path_factory.mktemp("tied"), tokenizer) as made:
        yield made


def test_a_tied_head_follows_the_embedding(tied, tokenizer):
    assert max(gaps_after_every_load(*tied, tokenizer)) < 1e-4


def test_the_weights_of_a_dense_model_are_read_back(tied):
    engine, network = tied
    sent = send(engine, network)
    assert engine._readable == [sent.keys()]


def test_a_matrix_that_does_not_take_effect_is_named(tied, tokenizer, monkeypatch):
    engine, network = tied
    send(engine, network)
    change(network, 9)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_layers, "pack_shared_weights", lambda model: None)
        with pytest.raises(RolloutError, match=r"different values for 1 tensor: model\.embed_tokens\.weight"):
            send(engine, network)
    send(engine, network)
    assert gap(engine, network, tokenizer) < 1e-4
