import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.models.forward import Network
from tests.tiny import make_model, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture
def network(folder):
    """A separate network for each test, with logits sharp enough that greedy choices have no ties."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return Network(model)
