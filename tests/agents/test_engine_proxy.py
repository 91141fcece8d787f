"""Which episode a request belongs to that an agent makes through an engine it kept."""

import asyncio
import threading

import pytest
from sessions import decode, encode
from sessions import params as sampling

from openrlhf.agents.engine_proxy import EngineProxy, RequestRouter, current_call
from openrlhf.agents.interface import params_for_agent
from openrlhf.agents.sandbox.messages import EngineAnswer
from openrlhf.errors import RolloutError
from openrlhf.types import Completion
from tests.tiny import make_tokenizer

PARAMS = params_for_agent(sampling(1)[0])


class Talk:
    """Episodes of one process, and what was sent to the trainer for them."""

    def __init__(self, *prompts):
        self.sent = []
        self.router = RequestRouter(self.sent.append, 64)
        self.router.tokenizer = make_tokenizer()
        self.proxies = [self.router.open(call, call, text) for call, text in enumerate(prompts)]

    async def from_server(self, text, kept=0):
        """Begins a request of unknown origin; (the task, the episode it went to)."""
        task = asyncio.ensure_future(self.router.generate(kept, None, encode(text), PARAMS))
        await asyncio.sleep(0)
        return task, self.sent[-1].call

    async def answer(self, place, text):
        request = self.sent[place]
        completion = Completion(tuple(encode(text)), (-1.0,) * len(text), text, "stop", 1)
        self.router.deliver(EngineAnswer(request.call, request.request, completion))
        await asyncio.sleep(0)


def test_first_requests_go_to_episodes_of_their_prompt_that_have_not_asked():
    async def go():
        talk = Talk("1+1=", "1+1=", "2+2=")
        return [(await talk.from_server(text))[1] for text in ("<u>2+2=<a>", "<u>1+1=<a>", "<u>1+1=<a>")]

    assert asyncio.run(go()) == [2, 0, 1]


def test_a_further_request_goes_to_the_episode_that_it_continues():
    async def go():
        talk = Talk("1+1=", "1+1=")
        for place, answer in enumerate("ab"):
            await talk.from_server("1+1=")
            await talk.answer(place, answer)
        return [(await talk.from_server(text))[1] for text in ("1+1=b;", "1+1=a;")]

    assert asyncio.run(go()) == [1, 0]


def test_a_request_whose_episode_ends_is_asked_for_another():
    async def go():
        talk = Talk("1+1=", "1+1=")
        task, first = await talk.from_server("1+1=")
        talk.router.close(first)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert talk.sent[-1].call == 1
        await talk.answer(-1, "b")
        return (await task).outputs[0].text

    assert asyncio.run(go()) == "b"


def test_the_code_of_an_episode_asks_for_it_whatever_engine_it_kept():
    async def go():
        talk = Talk("1+1=", "2+2=")
        current_call.set(1)
        task = asyncio.ensure_future(talk.proxies[0].generate(encode("anything"), PARAMS))
        await asyncio.sleep(0)
        await talk.answer(0, "b")
        return talk.sent[0].call, decode((await task).outputs[0].token_ids)

    assert asyncio.run(go()) == (1, "b")


def test_a_request_of_an_ended_episode_is_not_left_waiting():
    async def go():
        talk = Talk("1+1=", "1+1=")
        task = asyncio.ensure_future(talk.proxies[0].generate(encode("1+1="), PARAMS))
        await asyncio.sleep(0)
        talk.router.close(0)
        await task

    with pytest.raises(RolloutError, match="ended before its request was answered"):
        asyncio.run(go())


def test_outside_of_episodes_there_is_nothing_to_ask():
    async def go():
        await EngineProxy(Talk().router).generate(encode("1"), PARAMS)

    with pytest.raises(RolloutError, match="while no episode runs"):
        asyncio.run(go())


def test_a_thread_with_a_loop_of_its_own_gets_its_answer():
    async def go():
        talk, texts = Talk("1+1="), []

        async def ask():
            texts.append((await talk.proxies[0].generate(encode("1+1="), PARAMS)).outputs[0].text)

        thread = threading.Thread(target=lambda: asyncio.run(ask()))
        thread.start()
        while not talk.sent:
            await asyncio.sleep(0.01)
        await talk.answer(0, "2")
        await asyncio.to_thread(thread.join)
        return texts

    assert asyncio.run(go()) == ["2"]
