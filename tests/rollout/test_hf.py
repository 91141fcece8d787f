"""The Transformers engine: same tokens as model.generate, in any batch, with the log-probs that training computes."""

import asyncio
import copy
import subprocess
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from openrlhf import monitor
from openrlhf.agents.trajectory import join_turn
from openrlhf.config.sections.model import LoraFlags, ModelFlags
from openrlhf.data.collate import Layout
from openrlhf.models.forward import LogProbs, Network
from openrlhf.models.load import add_adapters, load_causal_lm
from openrlhf.models.plain import checkpoint_weights, plain_copy
from openrlhf.models.router_replay import RoutedLayers
from openrlhf.rl.samples import batch_trajectories
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.hf import HFEngine
from openrlhf.types import NOT_RECORDED, Prompt, Request, SamplingParams
from tests.commands import command_environ
from tests.samples import plain
from tests.tiny import CONFIGS, make_model
from tests.warm import warm_python

PROMPTS = ["a", "hello", "the cat", "x" * 20, "1+1=", "Z", "q?", "what is it", "no", "abcdefghijkl", "==", "w"]


def requests(tokenizer, **params):
    """Return one request per prompt, of uneven length, each with its own seed."""
    return [
        Request(
            tuple(tokenizer(text)["input_ids"]),
            SamplingParams(**{"max_tokens": 3 + 5 * number % 17, "seed": number} | params),
        )
        for number, text in enumerate(PROMPTS)
    ]


def said(completions):
    return [completion.token_ids.tolist() for completion in completions]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("max_rows", [2, 5, 128])
def test_greedy_tokens_equal_those_of_generate(max_rows, penalty, network, tokenizer):
    asked = requests(tokenizer, temperature=0.0, repetition_penalty=penalty)
    made = HFEngine(network, tokenizer, max_rows=max_rows).complete(asked)
    for request, completion in zip(asked, made, strict=True):
        ids = torch.tensor([request.prompt_token_ids])
        whole = network.decoder.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.params.max_tokens,
            do_sample=False,
            repetition_penalty=penalty,
        )
        assert completion.token_ids.tolist() == whole[0, ids.shape[1] :].tolist()
        assert completion.log_probs.tolist() == [0.0] * len(completion.token_ids)
        assert completion.text == tokenizer.decode(completion.token_ids.tolist())


def assert_trainable(network, asked, made, temperature=1.0):
    """Check the engine's log-probs against a forward pass over the whole sequence."""
    for request, completion in zip(asked, made, strict=True):
        prompt = request.prompt_token_ids
        item = join_turn(Prompt(0, "", prompt), completion, 1000)
        batch = batch_trajectories([item], Layout(packing=False, pad_id=0))
        found = network(batch, LogProbs, temperature=temperature).log_probs[0, len(prompt) :]
        assert completion.log_probs == pytest.approx(found.tolist(), abs=1e-5)


def test_log_probs_are_those_that_training_computes(network, tokenizer):
    asked = requests(tokenizer, temperature=0.7)
    assert_trainable(network, asked, HFEngine(network, tokenizer, max_rows=4).complete(asked), 0.7)


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_of_models(kind, tmp_path, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, kind))
    with torch.no_grad():  # sharp attention, so that a wrong mask or position shows
        for name, weight in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "c_attn")):
                weight.mul_(8)
    network, asked = Network(model.eval()), requests(tokenizer)
    assert_trainable(network, asked, HFEngine(network, tokenizer, max_rows=3).complete(asked))


@pytest.mark.slow(seconds=1)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("max_rows", [3, 128])
def test_experts_are_recorded_for_prompt_and_completion(max_rows, kind, tmp_path, tokenizer):
    network = Network(AutoModelForCausalLM.from_pretrained(make_model(tmp_path, kind)).eval())
    network.routed = RoutedLayers(network.decoder)
    asked = requests(tokenizer) + requests(tokenizer)[:3]  # some prompts occur twice
    for request, completion in zip(asked, HFEngine(network, tokenizer, max_rows=max_rows).complete(asked), strict=True):
        ids = [*request.prompt_token_ids, *completion.token_ids.tolist()]
        with network.routed.recording(), torch.no_grad():
            network.decoder(input_ids=torch.tensor([ids[:-1]]))
            assert completion.routed_experts.tolist() == network.routed.chosen().tolist()
        item = join_turn(Prompt(0, "", request.prompt_token_ids), completion, 1000)
        assert item.routed_experts.shape == (len(ids), 2, 2)
        assert item.routed_experts[-1].tolist() == [[NOT_RECORDED] * 2] * 2
    assert not network.routed.is_recording


@pytest.mark.parametrize("max_rows", [1, 3, 128])
def test_a_completion_does_not_depend_on_the_rest_of_the_batch(max_rows, network, tokenizer):
    asked = requests(tokenizer)
    whole = HFEngine(network, tokenizer).complete(asked)
    backwards = HFEngine(network, tokenizer, max_rows=max_rows).complete(asked[::-1])[::-1]
    assert said(backwards) == said(whole)
    for ours, theirs in zip(backwards, whole, strict=True):
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)


def test_each_seed_has_its_own_random_stream(network, tokenizer):
    engine = HFEngine(network, tokenizer)
    asked = [requests(tokenizer, max_tokens=12)[1]] * 3
    first, second, third = engine.complete(
        [replace(asked[0], params=replace(asked[0].params, seed=seed)) for seed in (1, 2, 1)]
    )
    assert plain(first) == plain(third)
    assert first.token_ids.tolist() != second.token_ids.tolist()


def test_on_done_is_called_once_per_request(network, tokenizer):
    heard = []
    made = HFEngine(network, tokenizer, max_rows=4).complete(requests(tokenizer), lambda *one: heard.append(one))
    assert sorted(heard, key=lambda one: one[0]) == list(enumerate(made))


@pytest.mark.parametrize("num_waiting", [1, 4])
def test_waiting_requests_get_the_first_free_slots(num_waiting, network, tokenizer, monkeypatch):
    """Waiting requests start as soon as enough rows have ended: after 10 steps, while the others take 20."""
    lengths = [10] * num_waiting + [20] * (64 - num_waiting) + [20] * num_waiting
    asked = [Request((5,), SamplingParams(max_tokens=length, min_tokens=length, temperature=0.0)) for length in lengths]
    engine = HFEngine(network, tokenizer, max_rows=64)
    sampled = []
    sample = engine._sample
    monkeypatch.setattr(engine, "_sample", lambda running, logits: (sampled.append(logits), sample(running, logits)))
    assert [len(one.token_ids) for one in engine.complete(asked)] == lengths
    assert len(sampled) <= 10 + 1 + 20  # rows are admitted one step after others were retired


@pytest.mark.parametrize("max_rows", [16, 32])
def test_a_row_that_ended_does_not_run_past_the_last_position(max_rows, tokenizer):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=1, n_head=2, eos_token_id=None)
    network = Network(GPT2LMHeadModel(config).eval())
    short = [Request((3, 4), SamplingParams(max_tokens=20, min_tokens=20)) for _ in range(31)]
    full = Request(tuple(range(1, 29)), SamplingParams(max_tokens=4, min_tokens=4))
    made = HFEngine(network, tokenizer, max_rows=max_rows).complete([full, *short])
    assert [len(one.token_ids) for one in made] == [4] + [20] * 31


def test_no_requests_give_no_completions(network, tokenizer):
    assert HFEngine(network, tokenizer).complete([]) == []


def answer(network, tokenizer, **params):
    (completion,) = HFEngine(network, tokenizer).complete(
        [Request(tuple(tokenizer("hello")["input_ids"]), SamplingParams(**{"max_tokens": 40, "seed": 5} | params))]
    )
    return completion


def test_max_tokens_limits_a_completion(network, tokenizer):
    with_limit, longer = answer(network, tokenizer, max_tokens=4), answer(network, tokenizer, max_tokens=6)
    assert with_limit.finish_reason == "length"
    assert with_limit.token_ids.tolist() == longer.token_ids.tolist()[:4]


def test_stop_tokens_and_strings_end_a_completion_and_are_included(network, tokenizer):
    whole = answer(network, tokenizer, temperature=0.5)
    fifth = int(whole.token_ids[4])
    end = whole.token_ids.tolist().index(fifth) + 1
    by_token = answer(network, tokenizer, temperature=0.5, stop_token_ids=(fifth,))
    assert by_token.token_ids.tolist() == whole.token_ids.tolist()[:end]
    assert by_token.finish_reason == "stop"
    text = tokenizer.decode(whole.token_ids[3:6].tolist())
    by_text = answer(network, tokenizer, temperature=0.5, stop=("never said", text))
    assert by_text.text.endswith(text)
    assert by_text.finish_reason == "stop"
    assert by_text.token_ids.tolist() == whole.token_ids[: len(by_text.token_ids)].tolist()


def test_eos_ends_a_completion_but_not_before_min_tokens(network, tokenizer):
    eos = tokenizer.eos_token_id
    with torch.no_grad():
        network.decoder.lm_head.weight.zero_()  # all tokens are equally likely
    seeds = range(400)
    lengths = [
        len(made.token_ids)
        for made in HFEngine(network, tokenizer).complete(
            [Request((5,), SamplingParams(max_tokens=30, min_tokens=10, stop_token_ids=(7,), seed=s)) for s in seeds]
        )
    ]
    assert min(lengths) >= 10
    made = answer(network, tokenizer, max_tokens=3000, min_tokens=1)
    assert made.token_ids[-1] == eos
    assert made.finish_reason == "stop"
    assert eos not in made.token_ids[:-1]


def test_an_end_token_beyond_the_vocabulary_is_ignored(network, tokenizer):
    network.decoder.generation_config.eos_token_id = [tokenizer.eos_token_id, len(tokenizer) + 5]
    assert len(answer(network, tokenizer, min_tokens=4).token_ids) >= 4


def test_a_completion_never_exceeds_max_tokens(network, tokenizer):
    """A long prompt may leave less room than --min_new_tokens."""
    made = answer(network, tokenizer, max_tokens=3, min_tokens=8)
    assert (len(made.token_ids), made.finish_reason) == (3, "length")


def test_a_stop_string_has_no_effect_before_min_tokens(network, tokenizer):
    first = answer(network, tokenizer, temperature=0.5).text[0]
    assert len(answer(network, tokenizer, temperature=0.5, stop=(first,)).token_ids) == 1
    assert len(answer(network, tokenizer, temperature=0.5, stop=(first,), min_tokens=4).token_ids) >= 4


def test_a_shared_network_needs_no_copy(network, tokenizer):
    engine = HFEngine(network, tokenizer)
    before = said(engine.complete(requests(tokenizer)))
    with torch.no_grad():
        network.decoder.lm_head.weight.copy_(network.decoder.lm_head.weight.flip(0))
    asyncio.run(engine.load([], 3))
    made = engine.complete(requests(tokenizer))
    assert said(made) != before
    assert {completion.version for completion in made} == {3}


def test_load_copies_weights_into_the_engines_own_network(network, tokenizer):
    engine = HFEngine(copy.deepcopy(network), tokenizer)
    before = said(engine.complete(requests(tokenizer)))
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1.5)
    assert said(engine.complete(requests(tokenizer))) == before
    asyncio.run(engine.load(checkpoint_weights(network), 1))
    assert said(engine.complete(requests(tokenizer))) == said(
        HFEngine(network, tokenizer).complete(requests(tokenizer))
    )
    assert engine.network.decoder.lm_head.weight.data_ptr() != network.decoder.lm_head.weight.data_ptr()


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_an_engines_own_network_equals_the_merged_policy(tmp_path, tokenizer, kind):
    name = make_model(tmp_path, kind, initializer_range=0.3)
    model = load_causal_lm(name, ModelFlags(), device=torch.device("cpu"), packing=False)
    torch.manual_seed(2)
    policy = Network(add_adapters(model, LoraFlags(lora_rank=4, target_modules=("all-linear",)), scalar=False)).eval()
    engine = HFEngine(plain_copy(policy), tokenizer)
    before = said(engine.complete(requests(tokenizer)))
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.3)
    assert said(engine.complete(requests(tokenizer))) == before
    sums = asyncio.run(engine.load(checkpoint_weights(policy), 1, verify=True))
    assert sums == {name: checksum(tensor) for name, tensor in checkpoint_weights(policy)}
    merged = Network(copy.deepcopy(policy.model).merge_and_unload())
    made = said(engine.complete(requests(tokenizer)))
    assert made == said(HFEngine(merged, tokenizer).complete(requests(tokenizer)))
    assert made != before


def test_generation_restores_the_network(network, tokenizer):
    network.train()
    attention = network.decoder.config._attn_implementation
    made = asyncio.run(HFEngine(network, tokenizer).generate(requests(tokenizer)))
    assert len(made) == len(PROMPTS)
    assert network.training
    assert network.decoder.training
    assert network.decoder.config._attn_implementation == attention
    assert all(weight.grad is None for weight in network.parameters())


STUCK = """
import sys, time
from transformers import AutoModelForCausalLM, AutoTokenizer
from openrlhf.models.forward import Network
from openrlhf.rollout.hf import HFEngine
from openrlhf.types import Request, SamplingParams

folder = sys.argv[1]
network, tokenizer = Network(AutoModelForCausalLM.from_pretrained(folder)), AutoTokenizer.from_pretrained(folder)
engine = HFEngine(network, tokenizer, timeout=1.0).prepare()
request = Request((5, 6), SamplingParams(max_tokens=8, min_tokens=8))
assert len(engine.complete([request])[0].token_ids) == 8
HFEngine._sample = lambda self, running, logits: time.sleep(3600)
engine.complete([request])
"""


@pytest.mark.slow(seconds=13)
def test_an_engine_without_new_tokens_ends_the_program(tmp_path):
    folder = make_model(tmp_path / "model")
    done = subprocess.run(
        [*warm_python(), "-c", STUCK, folder], capture_output=True, text=True, env=command_environ(), check=False
    )
    assert done.returncode == 1, done.stderr
    assert "error: the engine hangs: no progress for" in done.stderr
    assert (
        "(--engine_timeout 1) while generating 1 request. Try: the same command with --load_checkpoint" in done.stderr
    )


def test_a_long_batch_shows_its_progress_if_asked_to(network, tokenizer, monkeypatch, capsys):
    monkeypatch.setattr(monitor, "PAUSE", 0.0)  # every change gets a line
    asked = requests(tokenizer, temperature=0.0)
    for shows_progress in (False, True):
        asyncio.run(HFEngine(network, tokenizer, shows_progress=shows_progress).generate(asked))
        lines = capsys.readouterr().err.splitlines()
        assert bool(lines) == shows_progress
    most = max(request.params.max_tokens for request in asked)
    for number, line in enumerate(lines, 1):
        assert line.startswith(f"openrlhf: generate: token {number} of {most}, ")
    assert lines[0].endswith(" left, finished responses 0")


def test_calls_of_the_same_iteration_run_as_one_batch(network, tokenizer, monkeypatch):
    engine, asked = HFEngine(network, tokenizer), requests(tokenizer, temperature=0.0)
    batches = []
    honest = HFEngine.complete

    def complete(self, given, on_done=None, progress=None):
        batches.append(len(given))
        return honest(self, given, on_done, progress)

    monkeypatch.setattr(HFEngine, "complete", complete)

    async def one_by_one():
        return await asyncio.gather(*(engine.generate([request]) for request in asked))

    made = asyncio.run(one_by_one())
    assert batches == [len(asked)]
    assert said([completion for (completion,) in made]) == said(asyncio.run(engine.generate(asked)))
