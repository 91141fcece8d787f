"""vLLM in this process generates what the Transformers engine does, through new weights, pauses, sleep and errors."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from openrlhf.agents.trajectory import join_turn
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import Layout, collate
from openrlhf.errors import EngineError, RolloutError
from openrlhf.models.forward import LogProbs, Network
from openrlhf.rl.samples import batch_trajectories
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.hf import HFEngine
from openrlhf.rollout.sampling import SamplingState, truncate
from openrlhf.rollout.vllm_loop import routed_experts
from openrlhf.training.local import LocalBackend
from openrlhf.training.objectives import SFT
from openrlhf.types import Prompt, Request, SamplingParams, TokenRow
from tests.rollout.vllm_engines import ATTENTION, LONG, LONGEST, SHORT, begun, build
from tests.samples import plain
from tests.tiny import make_model

pytestmark = pytest.mark.slow(seconds=2)
PROMPTS = ["a", "hello", "the cat", "x" * 20, "1+1=", "Z", "q?", "what is it", "no", "abcdefghijkl", "==", "w"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(
        tmp_path_factory.mktemp("model"), seed=3, sharp=True, max_position_embeddings=LONGEST, **ATTENTION
    )


@pytest.fixture
def network(folder):
    return Network(AutoModelForCausalLM.from_pretrained(folder))


@pytest.fixture(scope="module")
def shared(folder, tokenizer):
    """One engine for the whole module: a start costs seconds."""
    engine = build(folder, tokenizer)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def engine(shared, folder):
    """The shared engine; its initial weights are restored afterwards."""
    yield shared
    asyncio.run(shared.load(weights_of(Network(AutoModelForCausalLM.from_pretrained(folder))), 0))


def requests(tokenizer, **params):
    """Return one request per prompt, of uneven length, each with its own seed."""
    return [
        Request(
            tuple(tokenizer(text)["input_ids"]),
            SamplingParams(**{"max_tokens": 3 + 5 * number % 17, "seed": number} | params),
        )
        for number, text in enumerate(PROMPTS)
    ]


def weights_of(network):
    return list(network.decoder.state_dict().items())


def other(network, factor=1.5):
    """Scale all weights of a network, and return it."""
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(factor)
    return network


def said(completions):
    return [completion.token_ids.tolist() for completion in completions]


def tokens_of(completion):
    """Return the tokens as a column, [tokens, 1]."""
    return torch.tensor(completion.token_ids, dtype=torch.long)[:, None]


def log_probs(network, request, completion, temperature=1.0):
    """Return the log-probs that training computes for a completion."""
    prompt = request.prompt_token_ids
    item = join_turn(Prompt(0, "", prompt), completion, 1000)
    batch = batch_trajectories([item], Layout(packing=False, pad_id=0))
    with torch.no_grad():
        return network(batch, LogProbs, temperature=temperature).log_probs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_tokens_equal_those_of_the_transformers_engine(penalty, engine, network, tokenizer):
    asked = requests(tokenizer, temperature=0.0, repetition_penalty=penalty)
    made = asyncio.run(engine.generate(asked))
    expected = HFEngine(network, tokenizer).complete(asked)
    assert said(made) == said(expected)
    assert [one.log_probs.tolist() for one in made] == [one.log_probs.tolist() for one in expected]
    assert [(one.text, one.finish_reason) for one in made] == [(one.text, one.finish_reason) for one in expected]


def test_log_probs_are_those_that_training_computes(engine, network, tokenizer):
    asked = requests(tokenizer, temperature=0.7)
    for request, completion in zip(asked, asyncio.run(engine.generate(asked)), strict=True):
        assert completion.log_probs == pytest.approx(log_probs(network, request, completion, 0.7), abs=1e-4)
        assert completion.text == tokenizer.decode(completion.token_ids.tolist())


@pytest.mark.parametrize("limit", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.8}], ids=str)
def test_log_probs_are_those_of_the_truncated_distribution(limit, engine, network, tokenizer):
    asked = requests(tokenizer, temperature=1.3, max_tokens=6, **limit)
    for request, completion in zip(asked, asyncio.run(engine.generate(asked)), strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = network.decoder(ids).logits[0, len(request.prompt_token_ids) - 1 : -1]
        state = SamplingState.of([request.params] * len(logits), logits.shape[-1], logits.device)
        expected = truncate((logits / 1.3).log_softmax(-1), state).gather(1, tokens_of(completion))
        assert completion.log_probs == pytest.approx(expected[:, 0].tolist(), abs=1e-4)


def test_each_seed_has_its_own_random_stream(engine, tokenizer):
    base = requests(tokenizer, max_tokens=12)[1]
    asked = [replace(base, params=replace(base.params, seed=seed)) for seed in (1, 2, 1)]
    first, second, third = asyncio.run(engine.generate(asked))
    assert first.token_ids.tolist() == third.token_ids.tolist()
    assert first.token_ids.tolist() != second.token_ids.tolist()


def answer(engine, tokenizer, **params):
    request = Request(tuple(tokenizer("hello")["input_ids"]), SamplingParams(**{"max_tokens": 40, "seed": 5} | params))
    (completion,) = asyncio.run(engine.generate([request]))
    return completion


def test_max_tokens_limits_a_completion(engine, tokenizer):
    with_limit, longer = answer(engine, tokenizer, max_tokens=4), answer(engine, tokenizer, max_tokens=6)
    assert with_limit.finish_reason == "length"
    assert with_limit.token_ids.tolist() == longer.token_ids.tolist()[:4]


def test_stop_tokens_and_strings_end_a_completion_and_are_included(engine, tokenizer):
    whole = answer(engine, tokenizer)
    ids = whole.token_ids.tolist()
    fifth = ids[4]
    by_token = answer(engine, tokenizer, stop_token_ids=(fifth,))
    assert by_token.token_ids.tolist() == ids[: ids.index(fifth) + 1]
    assert by_token.finish_reason == "stop"
    text = tokenizer.decode(ids[3:6])
    by_text = answer(engine, tokenizer, stop=("never said", text))
    assert by_text.text.endswith(text)
    assert by_text.finish_reason == "stop"
    assert by_text.token_ids.tolist() == ids[: len(by_text.token_ids)]
    assert len(by_text.log_probs) == len(by_text.token_ids)


def test_min_tokens_counts_the_end_token(engine, network, tokenizer):
    with torch.no_grad():
        network.decoder.lm_head.weight.zero_()  # all tokens are equally likely
    asyncio.run(engine.load(weights_of(network), 1))
    ends = tuple(range(40, 70))
    params = SamplingParams(max_tokens=60, min_tokens=10, stop_token_ids=ends)
    asked = [Request((5,), replace(params, seed=seed)) for seed in range(100)]
    made = asyncio.run(engine.generate(asked))
    assert min(len(completion.token_ids) for completion in made) == 10
    endings = {completion.token_ids[-1] for completion in made if completion.finish_reason == "stop"}
    assert endings <= {*ends, tokenizer.eos_token_id}
    assert all(not {*completion.token_ids[:9]} & {*ends, tokenizer.eos_token_id} for completion in made)


def test_eos_ends_a_completion_and_is_included(engine, network, tokenizer):
    with torch.no_grad():
        network.decoder.lm_head.weight.zero_()
    asyncio.run(engine.load(weights_of(network), 1))
    made = answer(engine, tokenizer, max_tokens=2000)
    assert made.token_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in made.token_ids[:-1]
    assert made.finish_reason == "stop"
    assert made.text.endswith(tokenizer.eos_token)


def test_a_stop_string_has_no_effect_before_min_tokens(engine, tokenizer):
    first = answer(engine, tokenizer).text[0]
    assert len(answer(engine, tokenizer, stop=(first,)).token_ids) == 1
    assert len(answer(engine, tokenizer, stop=(first,), min_tokens=4).token_ids) >= 4


def test_no_requests_give_no_completions(engine):
    assert asyncio.run(engine.generate([])) == []


def test_new_weights_take_effect_and_their_checksums_match(engine, network, tokenizer):
    asked = requests(tokenizer, temperature=0.0)
    before = asyncio.run(engine.generate(asked))
    weights = weights_of(other(network))
    sums = asyncio.run(engine.load(iter(weights), 7, verify=True))
    assert sums == {name: checksum(tensor) for name, tensor in weights}
    after = asyncio.run(engine.generate(asked))
    assert said(after) == said(HFEngine(network, tokenizer).complete(asked)) != said(before)
    assert engine.version == 7
    assert {completion.version for completion in after} == {7}
    assert asyncio.run(engine.load(weights, 8)) == {}


def test_training_continues_in_the_same_process(engine, network, tokenizer):
    torch.set_num_threads(2)  # vLLM would forbid this
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    backend = LocalBackend(network, OptimizerFlags(), torch.device("cpu"), learning_rate=1e-2)
    ids = torch.tensor(tokenizer("the cat sat")["input_ids"], dtype=torch.int32).numpy()
    batch = collate([TokenRow(ids, ids > 0)], packing=False, pad_id=1)
    asked = requests(tokenizer, temperature=0.0)
    losses = []
    for version in (1, 2):
        losses.append(float(backend.forward_backward([batch], SFT()).losses.sum()))
        backend.optim_step(1.0)
        asyncio.run(engine.load(backend.weights(), version))
        assert said(asyncio.run(engine.generate(asked))) == said(HFEngine(network, tokenizer).complete(asked))
    assert losses[1] < losses[0]


def test_concurrent_callers_get_the_same_completions(engine, tokenizer):
    asked = requests(tokenizer, temperature=0.0) * 5

    async def one_by_one():
        return await asyncio.gather(*(engine.generate([request]) for request in asked))

    assert plain([made for (made,) in asyncio.run(one_by_one())]) == plain(asyncio.run(engine.generate(asked)))


def test_cancelling_a_call_withdraws_its_requests(engine):
    async def cancel():
        task = await begun(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.resume()  # answered after the thread has handled the cancellation
        assert not engine._engine.has_unfinished_requests()

    asyncio.run(cancel())


def test_a_paused_request_continues_with_new_weights(engine, network, folder, tokenizer):
    async def change():
        task = await begun(engine)
        await engine.pause(drain=False)
        await engine.load(weights_of(other(network)), 5)
        waiting = asyncio.create_task(engine.generate([SHORT]))
        await engine.resume()
        return *await task, *await waiting

    made, later = asyncio.run(change())
    assert made.version == 0
    assert later.version == 5
    old = without_end(AutoModelForCausalLM.from_pretrained(folder), made, tokenizer)
    new = without_end(network.decoder, made, tokenizer)
    follows_old = [abs(ours - theirs) < 1e-4 for ours, theirs in zip(made.log_probs, old, strict=True)]
    changed = follows_old.index(False)
    assert 3 <= changed < len(old)
    assert made.log_probs[changed:] == pytest.approx(new[changed:], abs=1e-4)
    assert made.token_versions.tolist() == [0] * changed + [5] * (len(old) - changed)
    assert set(later.token_versions.tolist()) == {5}


def without_end(decoder, completion, tokenizer):
    """Return log-probs of the long request's tokens, with the end token forbidden."""
    with torch.no_grad():
        logits = decoder(torch.tensor([[*LONG.prompt_token_ids, *completion.token_ids.tolist()]])).logits[0, 2:-1]
    logits[:, tokenizer.eos_token_id] = -torch.inf
    return logits.log_softmax(-1).gather(1, tokens_of(completion))[:, 0].tolist()


@pytest.mark.parametrize("paused", [False, True])
def test_draining_finishes_running_requests_and_holds_new_ones(paused, engine):
    async def drain():
        task = await begun(engine)
        if paused:
            await engine.pause(drain=False)
        pausing = asyncio.create_task(engine.pause(drain=True))
        await asyncio.sleep(0)  # post the command before the next request
        late = asyncio.create_task(engine.generate([SHORT]))
        await pausing
        (made,) = await task
        assert len(made.token_ids) == LONG.params.max_tokens
        assert not late.done()
        await engine.resume()
        assert len(await late) == 1

    asyncio.run(drain())


def test_sleep_needs_new_weights_and_keeps_running_requests(engine, network, tokenizer):
    asked = requests(tokenizer, temperature=0.0)

    async def sleep():
        task = await begun(engine)
        await engine.pause(drain=False)
        await engine.sleep()
        await engine.resume()
        with pytest.raises(RolloutError, match="vLLM is asleep"):
            await engine.generate(asked)
        await engine.wake("weights")
        await engine.sleep()  # the cache is still asleep, so this only drops the weights
        await engine.load(weights_of(other(network)), 2)
        await engine.wake("cache")
        return await engine.generate(asked), await task

    made, (long,) = asyncio.run(sleep())
    assert said(made) == said(HFEngine(network, tokenizer).complete(asked))
    assert len(long.token_ids) == LONG.params.max_tokens


def test_after_an_interrupted_transfer_the_engine_waits_for_complete_weights(engine, network, tokenizer):
    asked = requests(tokenizer, temperature=0.0)
    weights = weights_of(other(network))
    names = [name for name, _ in weights]

    def cut_short():
        yield from weights[: names.index("model.layers.1.self_attn.k_proj.weight")]  # q has arrived, k and v have not
        raise RolloutError("the sender is gone")

    async def change():
        task = await begun(engine)
        await engine.pause(drain=False)
        with pytest.raises(RolloutError, match="the sender is gone"):
            await engine.load(cut_short(), 2)
        await engine.health()
        await engine.resume()
        with pytest.raises(RolloutError, match="no complete weights"):
            await engine.generate(asked)
        await engine.load(weights, 3)
        return await engine.generate(asked), await task

    made, (long,) = asyncio.run(change())
    assert said(made) == said(HFEngine(network, tokenizer).complete(asked))
    assert {completion.version for completion in made} == {3}
    assert len(long.token_ids) == LONG.params.max_tokens


def test_a_prompt_that_is_too_long_fails_only_its_own_call(engine, tokenizer):
    asked = requests(tokenizer, temperature=0.0)
    too_long = Request((5,) * (LONGEST + 1), SamplingParams(max_tokens=1))

    async def both():
        fine, refused = await asyncio.gather(
            engine.generate(asked), engine.generate([*asked, too_long]), return_exceptions=True
        )
        await engine.health()
        return fine, refused

    fine, refused = asyncio.run(both())
    assert len(fine) == len(asked)
    assert isinstance(refused, RolloutError)
    assert "maximum" in str(refused)
    assert not engine._engine.has_unfinished_requests()


def test_a_missing_parameter_is_named_and_stops_generation_until_it_arrives(engine, network):
    name = "model.layers.1.self_attn.k_proj.weight"
    whole = list(weights_of(network))
    lacking = [(key, tensor) for key, tensor in whole if key not in (name, "model.norm.weight")]

    async def change():
        task = await begun(engine)
        with pytest.raises(RolloutError, match=f"no weights arrived for {name}, model.norm.weight") as refusal:
            await engine.load(lacking, 1)
        assert not isinstance(refusal.value, EngineError)  # the engine need not be restarted
        await engine.health()
        with pytest.raises(RolloutError, match="no complete weights"):
            await engine.generate([SHORT])
        await engine.load(whole, 2)
        (long,) = await task
        return long

    assert len(asyncio.run(change()).token_ids) == LONG.params.max_tokens


def finished(experts):
    """vLLM's output for a prompt of 4 tokens and a completion of 3."""
    from vllm import CompletionOutput, RequestOutput  # after the engine, which sets the variables that vLLM reads

    made = CompletionOutput(0, "abc", [7, 8, 9], None, None, finish_reason="stop", routed_experts=experts)
    return RequestOutput("1", "abcd", [3, 4, 5, 6], None, [made], finished=True)


def test_reported_experts_are_those_of_every_input_token():
    experts = np.arange(7 * 2 * 3, dtype=np.uint8).reshape(7, 2, 3)  # [tokens, layers, k]
    for reported in (experts[:6], experts):  # without and with the last token, which is never an input
        found = routed_experts(finished(reported))
        assert found.dtype == np.int16
        assert found.tolist() == experts[:6].tolist()
    apart = finished(experts[4:])  # as some versions report them
    apart.prompt_routed_experts = experts[:4]
    assert routed_experts(apart).tolist() == experts[:6].tolist()


@pytest.mark.parametrize(
    ("experts", "problem"),
    [
        (None, "got the experts of 0 tokens"),
        (np.ones((5, 2, 3), np.uint8), "got the experts of 5 tokens"),
        (np.zeros((6, 2, 3), np.uint8), "got only zeros"),
    ],
)
def test_experts_that_vllm_did_not_record_are_rejected(experts, problem):
    with pytest.raises(RolloutError, match=f"expected those of 6 tokens, {problem}"):
        routed_experts(finished(experts))
