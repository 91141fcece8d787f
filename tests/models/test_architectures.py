"""Every causal-LM family of the installed Transformers, on a tiny model: correct to 1e-4, or rejected with a message.

Each test is a column of docs/models.md, which `make matrix` writes from all families. `make test` tries a few of them.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from openrlhf.config.sections.model import LoraFlags, ModelFlags
from openrlhf.data.collate import pack, pad
from openrlhf.errors import ConfigError, OpenRLHFError
from openrlhf.models.export import save_model
from openrlhf.models.forward import LogProbs, Network, Scores
from openrlhf.models.heads import VocabularyHead
from openrlhf.models.load import add_adapters, load_causal_lm, load_scalar_model
from openrlhf.models.modes import attention_of
from openrlhf.models.plain import plain_copy
from openrlhf.models.self_test import choose_layout
from openrlhf.rollout.hf import HFEngine
from openrlhf.training.audit import STEPS, Audit
from openrlhf.training.optim import trainable
from openrlhf.types import Batch, Request, SamplingParams, TokenRow
from tests.models.architectures import BOS, FAMILIES, PAD, UNBUILT, VOCAB, build
from tests.models.networks import per_row, plain_log_probs
from tests.tiny import make_tokenizer

TOLERANCE = 1e-4
CPU = torch.device("cpu")
LENGTHS = (7, 12, 5)  # longer and shorter than a sliding window

# Expectations of `make test`, for one family of each kind: its layout, and the columns that reject it.
FAST: dict[str, tuple[str, set[str]]] = {
    "llama": ("packed", set()),
    "qwen3_moe": ("packed", set()),
    "gemma3_text": ("packed", set()),
    "gemma3": ("packed", set()),  # a text decoder with a vision encoder
    "cohere": ("packed", {"reward model"}),
    "minicpm3": ("packed", set()),
    "lfm2": ("packed", {"reward model"}),
    "gpt_oss": ("padded", set()),
    "bloom": ("padded", set()),
    "qwen3_next": ("padded", set()),
    "granitemoehybrid": ("padded", {"reward model"}),
    "falcon_h1": ("padded", {"LoRA", "reward model"}),
    "mamba2": ("padded", {"LoRA", "reward model"}),
    "xlnet": ("row by row", {"training", "reward model"}),
    "prophetnet": ("refused", {"training", "LoRA", "reward model", "save and reload", "generation"}),
}
# Transformers sets the embedding of the pad token to zero whenever it loads one of these.
FORGETS_PAD = {"youtu"}


@dataclass(frozen=True)
class Tiny:
    """A family's tiny model, in memory and as a folder."""

    family: str
    model: PreTrainedModel
    folder: Path


def marks(family: str) -> list[pytest.MarkDecorator]:
    """One process tries all columns of a family."""
    group = pytest.mark.xdist_group(family)
    return [group] if family in FAST else [group, pytest.mark.matrix]


@pytest.fixture(scope="module", params=[pytest.param(family, marks=marks(family)) for family in FAMILIES])
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = build(request.param, attention="eager")  # every family has it, and it is exact
    model.save_pretrained(folder)
    return Tiny(request.param, model, folder)


@pytest.fixture
def column(tiny, record_property):
    """A column of the page: the body succeeds, or raises one of our errors, whose message is recorded."""

    @contextmanager
    def filled(name: str) -> Iterator[None]:
        outcome = "yes"
        try:
            yield
        except OpenRLHFError as error:
            outcome = f"refused: {error.message.replace(str(tiny.folder), tiny.family)}"
        record_property(name, outcome)
        if tiny.family in FAST:
            assert outcome.startswith("refused") == (name in FAST[tiny.family][1]), outcome

    return filled


def make_rows() -> list[TokenRow]:
    """Sequences without special tokens, every token a target."""
    random = np.random.default_rng(1)
    rows = [random.integers(BOS + 1, VOCAB, length, dtype=np.int32) for length in LENGTHS]
    return [TokenRow(row, np.ones(len(row), bool)) for row in rows]


ROWS = make_rows()
BATCHES: dict[str, Callable[[list[TokenRow]], Batch]] = {"packed": pack, "padded": lambda rows: pad(rows, PAD)}


def settled(model: torch.nn.Module) -> Network:
    """Return the network as a run uses it, after the self-test."""
    network = Network(model).eval()
    with torch.no_grad():
        choose_layout(network, network)
    return network


def load(folder: Path) -> PreTrainedModel:
    return load_causal_lm(str(folder), ModelFlags(), device=CPU, packing=True)


def load_scalar(folder: Path, *, new_head: bool) -> Network:
    return settled(
        load_scalar_model(str(folder), ModelFlags(), device=CPU, packing=True, head_prefix="score", new_head=new_head)
    )


def log_probs(network: Network, batch: Batch) -> list[Tensor]:
    """[tokens - 1] for each sequence."""
    return [row[1:] for row in per_row(network(batch, LogProbs).log_probs, batch)]


def largest(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def weighted(found: list[Tensor]) -> Tensor:
    """A loss whose gradient differs from token to token."""
    return torch.stack([(row * torch.linspace(-1.0, 1.0, len(row))).sum() for row in found]).sum()


def assert_learns(network: Network) -> None:
    """Run the audit of a run's first steps, which raises if a trained parameter gets no gradient."""
    audit = Audit(trainable(network), lambda parameter: parameter.detach(), lambda found: found)
    for _ in range(STEPS):
        audit.begin(learning_rate=1.0)
        weighted(log_probs(network, pack(ROWS))).backward()
        audit.end()
        network.zero_grad(set_to_none=True)


def test_log_probs(tiny, record_property):
    try:
        network = settled(load(tiny.folder))
        layout = network.layout
    except OpenRLHFError as error:
        layout = f"refused: {error.message.replace(str(tiny.folder), tiny.family)}"
    record_property("layout", layout)
    if tiny.family in FAST:
        assert layout.startswith(FAST[tiny.family][0]), layout
    if layout.startswith("refused"):
        return
    with torch.no_grad():
        expected = [plain_log_probs(tiny.model, row) for row in ROWS]
        found = [log_probs(network, pack([row]))[0] for row in ROWS]
        errors = {"alone": largest(found, expected)}
        for name, lay_out in BATCHES.items():
            errors[name] = largest(log_probs(network, lay_out(ROWS)), expected)
    record_property("error", max(errors.values()))
    assert max(errors.values()) < TOLERANCE, errors


def test_training(tiny, column, record_property):
    with column("training"):
        network = settled(add_adapters(load(tiny.folder), LoraFlags(), scalar=False)).train()
        weighted(log_probs(network, pack(ROWS))).backward()
        found = {name: parameter.grad for name, parameter in network.decoder.named_parameters()}
        weighted([plain_log_probs(tiny.model.train(), row) for row in ROWS]).backward()
        expected = {name: parameter.grad for name, parameter in tiny.model.eval().named_parameters()}
        tiny.model.zero_grad(set_to_none=True)
        expected = {name: gradient for name, gradient in expected.items() if gradient is not None}
        scale = max(float(gradient.abs().max()) for gradient in expected.values())
        error = largest([found[name] / scale for name in expected], [expected[name] / scale for name in expected])
        record_property("error", error)
        assert error < TOLERANCE
        network.zero_grad(set_to_none=True)
        assert_learns(network)


def test_lora(tiny, column, record_property):
    with column("LoRA"):
        network = settled(add_adapters(load(tiny.folder), LoraFlags(lora_rank=2), scalar=False))
        torch.manual_seed(0)
        with torch.no_grad():
            for _, parameter in trainable(network):
                parameter.copy_(0.1 * torch.randn_like(parameter))
        assert_learns(network)  # an adapter that nothing calls learns nothing, yet would be merged
        with torch.no_grad():
            adapted = log_probs(network, pack(ROWS))
            assert largest(adapted, [plain_log_probs(tiny.model, row) for row in ROWS]) > TOLERANCE
            merged = plain_copy(network)
            choose_layout(merged, merged)
            error = largest(log_probs(merged, pack(ROWS)), adapted)
        record_property("error", error)
        assert error < TOLERANCE


@torch.no_grad()
def test_reward_model(tiny, column, record_property, tmp_path):
    with column("reward model"):
        network = load_scalar(tiny.folder, new_head=True)
        network.scalar_head.weight.mul_(20)  # it begins near zero
        with attention_of(network.decoder, "eager"):
            alone = [network.decoder(input_ids=pack([row]).input_ids).logits.view(1) for row in ROWS]
        together = network(pack(ROWS), Scores).scores
        save_model(network, tmp_path)
        again = load_scalar(tmp_path, new_head=False)(pack(ROWS), Scores).scores
        error = max(largest(list(together.split(1)), alone), largest([again], [together]))
        record_property("error", error)
        assert error < TOLERANCE


@torch.no_grad()
def test_save_and_reload(tiny, column, record_property, tmp_path):
    with column("save and reload"):
        network = settled(load(tiny.folder))
        torch.manual_seed(1)
        for parameter in network.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        if tiny.family in FORGETS_PAD:
            network.decoder.get_input_embeddings().weight[PAD] = 0.0
        before = log_probs(network, pack(ROWS))
        save_model(network, tmp_path)
        error = largest(log_probs(settled(load(tmp_path)), pack(ROWS)), before)
        record_property("error", error)
        assert error < TOLERANCE


@torch.no_grad()
def test_generation(tiny, column, record_property):
    """The in-process engine, with rows that come and go: its log-probs are those of training."""
    with column("generation"):
        network = settled(load(tiny.folder))
        prompts = [tuple(row.input_ids.tolist()) for row in ROWS]
        asked = [Request(ids, SamplingParams(max_tokens=5 + place, seed=place)) for place, ids in enumerate(prompts)]
        made = HFEngine(network, make_tokenizer(), max_rows=2).complete(asked)
        found, expected = [], []
        for prompt, completion in zip(prompts, made, strict=True):
            ids = np.array([*prompt, *completion.token_ids], dtype=np.int32)
            expected.append(log_probs(network, pack([TokenRow(ids, ids >= 0)]))[0][len(prompt) - 1 :])
            found.append(torch.tensor(completion.log_probs))
        record_property("error", largest(found, expected))
        assert largest(found, expected) < TOLERANCE


@pytest.mark.parametrize(
    "family",
    ["cohere", "granite", "minicpm3", "hyperclovax", "falcon_h1", "gemma2", "modernbert-decoder", "inkling_text"],
)
def test_an_incomplete_head_is_rejected(family, monkeypatch):
    """If the scaling, cap or transformation of logits is left out, the self-test rejects the family."""
    model = build(family, attention="eager")
    settled(model)
    monkeypatch.setattr(VocabularyHead, "__call__", lambda self, hidden: self.module(hidden))
    monkeypatch.setattr("openrlhf.models.forward.logit_factor", lambda decoder: None)
    with pytest.raises(
        ConfigError, match=r"no layout reproduces the forward pass of .* differs from the model.s own results by"
    ):
        settled(model)


PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_lists_every_family_of_the_installed_transformers():
    listed = set(re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), flags=re.MULTILINE))
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) <= listed, "run `make matrix`"


def test_every_family_has_a_tiny_model_or_a_reason():
    assert set(FAMILIES) | set(UNBUILT) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert len(FAMILIES) >= 120
