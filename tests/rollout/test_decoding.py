"""Decoding strategies: which one each family gets, that it is correct there, and that a wrong one is detected."""

import asyncio
import re
from dataclasses import dataclass, replace

import pytest
import torch

from openrlhf.errors import ConfigError
from openrlhf.models.forward import Network
from openrlhf.models.grouped_attention import GROUPED
from openrlhf.models.modes import evaluating
from openrlhf.rollout.decoding import CachedRows, ContinuousBatching
from openrlhf.rollout.decoding_check import choose_decoding, own_log_probs
from openrlhf.rollout.fallback_decoding import OwnCaches, Uncached
from openrlhf.rollout.hf import HFEngine
from openrlhf.types import Request, SamplingParams
from tests.models.architectures import build
from tests.tiny import make_tokenizer

LENGTHS = (9, 3, 3, 14, 1, 5, 9)


def ask(**params):
    """Return requests of uneven length; two pairs have prompts of equal length."""
    return [
        Request(
            tuple(range(20 + number, 20 + number + length)),
            SamplingParams(**{"max_tokens": 2 + 3 * number % 8, "seed": number} | params),
        )
        for number, length in enumerate(LENGTHS)
    ]


def assert_own(network, asked, made, tolerance=2e-4):
    """Check the engine's log-probs against the model's own forward over each whole sequence."""
    for request, completion in zip(asked, made, strict=True):
        prompt, answer = request.prompt_token_ids, completion.token_ids
        with torch.no_grad(), evaluating(network.decoder, "eager"):
            (found,) = own_log_probs(network.decoder, [[*prompt, *answer]])
        expected = found[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None]).squeeze(1)
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=tolerance)


@pytest.mark.parametrize(
    ("family", "way", "attention"),
    [
        ("llama", ContinuousBatching, GROUPED),
        ("gpt2", ContinuousBatching, "sdpa"),  # as many key heads as query heads
        ("gpt_oss", ContinuousBatching, "eager"),  # attention sinks
        ("gemma2", ContinuousBatching, "eager"),  # capped attention scores
        ("bloom", ContinuousBatching, "eager"),  # positions in the mask
        ("qwen3_next", ContinuousBatching, GROUPED),  # a linear and an attention layer
        ("granitemoehybrid", ContinuousBatching, GROUPED),
        ("falcon_h1", ContinuousBatching, GROUPED),  # both in one layer
        ("mamba2", ContinuousBatching, "eager"),  # no attention
        ("deepseek_v32", ContinuousBatching, "sdpa"),  # sparse attention with its own keys
        ("minimax", OwnCaches, GROUPED),  # a cache class of the family
        ("rwkv", OwnCaches, "eager"),  # a state that is wrong for more than one row
        ("openai-gpt", Uncached, None),
    ],
)
def test_a_family_gets_the_fastest_correct_strategy(family, way, attention):
    network, asked = Network(build(family)), ask()
    engine = HFEngine(network, make_tokenizer(), max_rows=3).prepare()
    assert (type(engine.decoding), engine.decoding.attention) == (way, attention)
    assert_own(network, asked, engine.complete(asked))


@pytest.mark.parametrize(
    "way",
    [
        lambda network: ContinuousBatching(network.decoder, "sdpa", pads_prompts=False),
        lambda network: OwnCaches(network.decoder, "sdpa"),
        lambda network: OwnCaches(network.decoder, "sdpa", by_length=False),
        Uncached,
        lambda network: Uncached(network, row_by_row=True),
    ],
)
def test_each_strategy_gives_the_same_completions(way):
    network, asked = Network(build("qwen3_next")), ask()
    fast, slow = HFEngine(network, make_tokenizer(), max_rows=3), HFEngine(network, make_tokenizer(), max_rows=3)
    slow.decoding = way(network)
    for ours, theirs in zip(slow.complete(asked), fast.complete(asked), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "falcon_h1", "minimax"])
def test_samples_of_a_prompt_are_those_of_separate_calls(family):
    network = Network(build(family))
    engine = HFEngine(network, make_tokenizer(), max_rows=5)
    asked = [
        Request(request.prompt_token_ids, replace(request.params, seed=seed)) for request in ask() for seed in range(3)
    ]
    for request, together in zip(asked, engine.complete(asked), strict=True):
        (alone,) = engine.complete([request])
        assert together.token_ids.tolist() == alone.token_ids.tolist()
        assert together.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


def test_a_prompt_is_prefilled_once_for_all_of_its_samples():
    model, seen = build("llama"), []
    engine = HFEngine(Network(model), make_tokenizer()).prepare()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    prompts = ((21, 22, 23), (24, 25, 26))
    engine.complete(
        [Request(prompts[seed % 2], SamplingParams(max_tokens=2, min_tokens=2, seed=seed)) for seed in range(8)]
    )
    assert seen == [(2, 3), (8, 1)]


def test_requested_eager_attention_is_used():
    model = build("llama")
    model.set_attn_implementation("eager")
    seen = []
    model.model.register_forward_pre_hook(lambda *_: seen.append(model.config._attn_implementation))
    HFEngine(Network(model), make_tokenizer()).complete(ask())
    assert set(seen) == {"eager"}


@dataclass(frozen=True)
class Broken(ContinuousBatching):
    """Continuous batching with one fault."""

    fault: str = ""

    def prefill(self, prompts):
        rows, logits = super().prefill(prompts)
        return BrokenRows(rows.forward, rows.cache, rows.mask, fault=self.fault), logits


@dataclass
class BrokenRows(CachedRows):
    fault: str = ""

    def step(self, tokens, ended):
        if self.fault == "step":
            raise IndexError("list index out of range")
        return super().step(tokens, ended) * (torch.nan if self.fault == "numbers" else 1.0)

    def keep(self, places):
        super().keep(places[::-1] if self.fault == "keep" else places)

    def add(self, *others):
        super().add(*others)
        if self.fault == "add":
            self.mask = torch.ones_like(self.mask)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("keep", "differs from the model's own results by "),
        ("add", "differs from the model's own results by "),
        ("numbers", "differs from the model's own results by inf (0.0001 allowed)"),
        ("step", "fails with IndexError: list index out of range"),
    ],
)
def test_a_wrong_strategy_is_detected(fault, problem, capsys):
    network = Network(build("llama"))
    broken = Broken(network.decoder, "sdpa", fault=fault)
    right = ContinuousBatching(network.decoder, "eager")
    assert choose_decoding(network, [broken, right]) is right
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"openrlhf: LlamaForCausalLM: continuous batching with sdpa attention {problem}")
    assert line.endswith(", so it generates with continuous batching with eager attention")
    with pytest.raises(ConfigError, match=re.escape(f"continuous batching with sdpa attention {problem}")):
        choose_decoding(network, [broken])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choosing_the_first_strategy_prints_nothing(dtype, capsys):
    choose_decoding(Network(build("qwen3_next").to(dtype)))
    assert capsys.readouterr().err == ""


def test_a_wrong_strategy_is_detected_in_half_precision():
    network = Network(build("llama").to(torch.bfloat16))
    broken = Broken(network.decoder, "sdpa", fault="add")
    right = ContinuousBatching(network.decoder, "sdpa")
    assert choose_decoding(network, [broken, right]) is right


def test_without_the_check_the_first_strategy_is_used():
    network = Network(build("llama"), self_test=False)
    broken = Broken(network.decoder, "sdpa", fault="step")
    assert choose_decoding(network, [broken]) is broken


def test_the_check_restores_the_model_and_the_random_state():
    network = Network(build("gpt_oss")).train()
    before = torch.get_rng_state()
    choose_decoding(network)
    assert torch.equal(torch.get_rng_state(), before)
    assert network.decoder.training
    assert network.decoder.config._attn_implementation == "eager"


def test_a_stream_yields_the_tokens_of_the_completion():
    network = Network(build("llama")).train()
    engine = HFEngine(network, make_tokenizer())
    (request, *_) = ask(max_tokens=6, min_tokens=6)
    (whole,) = asyncio.run(engine.generate([request]))
    assert list(engine.stream(request)) == whole.token_ids.tolist()
    stream = engine.stream(request)
    assert next(stream) == whole.token_ids[0]
    stream.close()
    assert network.decoder.training
