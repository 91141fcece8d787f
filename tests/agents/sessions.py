"""Sessions and prompts for tests: a policy that is a function, and the children of this process."""

import asyncio
from contextlib import suppress
from pathlib import Path

from openrlhf.types import Completion, Prompt, SamplingParams
from tests.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
WATCHDOG = 300.0  # seconds; far above what anything takes
TOOL_TEMPLATE = (  # as those of Qwen: tools in front, calls as tagged JSON
    "{% for t in tools or [] %}{{ '[' + t['function']['name'] + ']' }}{% endfor %}"
    "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ '<tool_call>' + c['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


class Say:
    """Answers the k-th request with the k-th text, one token a character, each at log-prob -(k + 1)."""

    def __init__(self, *texts, finish="stop", version=3):
        self.texts, self.finish, self.version = texts, finish, version
        self.requests = []
        self.closed = 0

    async def generate(self, request):
        number = len(self.requests)
        self.requests.append(request)
        text = self.texts[min(number, len(self.texts) - 1)]
        ids = tuple(encode(text)[: request.params.max_tokens])
        cut = len(ids) < len(encode(text))
        finish = "length" if cut else self.finish
        return Completion(ids, (-float(number + 1),) * len(ids), decode(ids), finish, self.version)

    def close(self):
        self.closed += 1


class InStep(Say):
    """A session that is answered only when every living one of its group waits, as the loop does it."""

    @staticmethod
    def group(*texts):
        sessions = []
        sessions += [InStep(sessions, *said) for said in texts]
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


class Numbered:
    """Each session says its own number."""

    @staticmethod
    def group(count):
        return [Say(str(number)) for number in range(count)]


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def decode(ids):
    return TOKENIZER.decode(list(ids))


def prompt(text="1+1=", label="2", index=7):
    return Prompt(index, text, tuple(encode(text)), label)


def params(count, **options):
    return [SamplingParams(**{"max_tokens": 16, "seed": seed} | options) for seed in range(count)]


def run(executor, sessions, *, asked=None, **options):
    """One group through the executor, which is closed afterwards whatever happened."""
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
    """Pids whose parent is this process."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found |= set((task / "children").read_text().split())
    return found
