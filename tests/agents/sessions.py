"""Sessions with scripted answers in place of a policy, prompts, and helpers that run an executor or a server."""

import asyncio
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

from aiohttp import web

from openrlhf.types import Completion, Prompt, SamplingParams
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
WATCHDOG = 300.0  # seconds, far more than any test takes
TOOL_TEMPLATE = (  # like that of Qwen: tools first, calls as tagged JSON
    "{% for t in tools or [] %}{{ '[' + t['function']['name'] + ']' }}{% endfor %}"
    "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + c['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


class Scripted:
    """Session that answers request k with text k, one token per character, each with log-prob -(k + 1)."""

    def __init__(self, *texts, finish="stop", version=3):
        self.texts, self.finish, self.version = texts, finish, version
        self.requests = []
        self.closed = 0

    async def generate(self, request, *, last=False):
        number = len(self.requests)
        self.requests.append(request)
        text = self.texts[min(number, len(self.texts) - 1)]
        ids = tuple(encode(text)[: request.params.max_tokens])
        cut = len(ids) < len(encode(text))
        finish = "length" if cut else self.finish
        if last:
            self.close()
        return Completion.of(ids, (-float(number + 1),) * len(ids), decode(ids), finish, self.version)

    def close(self):
        self.closed += 1


class Lockstep(Scripted):
    """Session that is answered only when every open session of its group waits, as in the RL loop."""

    @staticmethod
    def group(*texts):
        sessions = []
        sessions += [Lockstep(sessions, *said) for said in texts]
        return sessions

    def __init__(self, others, *texts):
        super().__init__(*texts)
        self.others, self.waits = others, None

    async def generate(self, request):
        self.waits = asyncio.get_running_loop().create_future()
        self.turn()
        await self.waits
        return await super().generate(request)

    def close(self):
        assert self.waits is None or self.waits.done(), "closed while a request of it waits"
        super().close()
        self.turn()

    def turn(self):
        living = [session for session in self.others if not session.closed]
        if all(session.waits and not session.waits.done() for session in living):
            for session in living:
                session.waits.set_result(None)


def numbered(count):
    """Return sessions that each answer with their own number."""
    return [Scripted(str(number)) for number in range(count)]


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def decode(ids):
    return TOKENIZER.decode([int(token) for token in ids])


def prompt(text="1+1=", label="2", index=7):
    return Prompt(index, text, tuple(encode(text)), label)


def params(count, **options):
    return [SamplingParams(**{"max_tokens": 16, "seed": seed} | options) for seed in range(count)]


def run(executor, sessions, *, asked=None, **options):
    """Run one group and close the executor, even after an error."""
    return run_all(executor, [(asked or prompt(), sessions)], **options)[0]


def run_all(executor, groups, **options):
    async def go():
        try:
            jobs = [executor.run_group(item, params(len(sessions), **options), sessions) for item, sessions in groups]
            return await asyncio.wait_for(asyncio.gather(*jobs), WATCHDOG)
        finally:
            await asyncio.wait_for(executor.close(), WATCHDOG)

    return asyncio.run(go())


def children():
    """Return the pids of the child processes."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            found |= set((task / "children").read_text().split())
    return found


@contextmanager
def served(app):
    """Run the app in a thread and yield its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = web.AppRunner(app)

    async def start():
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    try:
        yield f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(start(), loop).result()}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
