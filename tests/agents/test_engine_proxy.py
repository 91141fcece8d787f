"""Assignment of requests to episodes when an agent keeps the engine of an earlier one."""

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


class RunningEpisodes:
    """The running episodes of one process, and the requests sent to the trainer."""

    def __init__(self, *prompts):
        self.sent = []
        self.router = RequestRouter(self.sent.append, 64, make_tokenizer())
        self.proxies = [self.router.open(call, call, text) for call, text in enumerate(prompts)]

    async def from_server(self, text, kept=0):
        """Start a request of unknown origin; return its task and the episode it was assigned to."""
        task = asyncio.ensure_future(self.router.generate(kept, None, encode(text), PARAMS))
        await asyncio.sleep(0)
        return task, self.sent[-1].call

    async def answer(self, place, text):
        request = self.sent[place]
        completion = Completion.of(encode(text), (-1.0,) * len(text), text, "stop", 1)
        self.router.deliver(EngineAnswer(request.call, request.request, completion))
        await asyncio.sleep(0)


def test_first_request_goes_to_an_unused_episode_with_its_prompt():
    async def go():
        episodes = RunningEpisodes("1+1=", "1+1=", "2+2=")
        return [(await episodes.from_server(text))[1] for text in ("<u>2+2=<a>", "<u>1+1=<a>", "<u>1+1=<a>")]

    assert asyncio.run(go()) == [2, 0, 1]


def test_later_request_goes_to_the_episode_that_it_continues():
    async def go():
        episodes = RunningEpisodes("1+1=", "1+1=")
        for place, answer in enumerate("ab"):
            await episodes.from_server("1+1=")
            await episodes.answer(place, answer)
        return [(await episodes.from_server(text))[1] for text in ("1+1=b;", "1+1=a;")]

    assert asyncio.run(go()) == [1, 0]


def test_request_is_assigned_again_if_its_guessed_episode_ends():
    async def go():
        episodes = RunningEpisodes("1+1=", "1+1=")
        task, first = await episodes.from_server("1+1=")
        episodes.router.close(first)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert episodes.sent[-1].call == 1
        await episodes.answer(-1, "b")
        return (await task).outputs[0].text

    assert asyncio.run(go()) == "b"


def test_request_belongs_to_the_episode_whose_code_makes_it():
    async def go():
        episodes = RunningEpisodes("1+1=", "2+2=")
        current_call.set(1)
        task = asyncio.ensure_future(episodes.proxies[0].generate(encode("anything"), PARAMS))
        await asyncio.sleep(0)
        await episodes.answer(0, "b")
        return episodes.sent[0].call, decode((await task).outputs[0].token_ids)

    assert asyncio.run(go()) == (1, "b")


def test_request_fails_if_its_episode_ends():
    async def go():
        episodes = RunningEpisodes("1+1=", "1+1=")
        task = asyncio.ensure_future(episodes.proxies[0].generate(encode("1+1="), PARAMS))
        await asyncio.sleep(0)
        episodes.router.close(0)
        await task

    with pytest.raises(RolloutError, match="ended before its request was answered"):
        asyncio.run(go())


def test_request_outside_of_episodes_is_rejected():
    async def go():
        await EngineProxy(RunningEpisodes().router).generate(encode("1"), PARAMS)

    with pytest.raises(RolloutError, match="while no episode was running"):
        asyncio.run(go())


def test_request_from_another_threads_event_loop_is_answered():
    async def go():
        episodes, texts = RunningEpisodes("1+1="), []

        async def ask():
            texts.append((await episodes.proxies[0].generate(encode("1+1="), PARAMS)).outputs[0].text)

        thread = threading.Thread(target=lambda: asyncio.run(ask()))
        thread.start()
        while not episodes.sent:
            await asyncio.sleep(0.01)
        await episodes.answer(0, "2")
        await asyncio.to_thread(thread.join)
        return texts

    assert asyncio.run(go()) == ["2"]
