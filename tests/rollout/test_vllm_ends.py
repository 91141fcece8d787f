"""vLLM engines that are closed, fail or do not start; one at a time, because a process can hold only one."""

import asyncio
import os
import time

import pytest
import torch

from openrlhf.errors import EngineError, RolloutError
from openrlhf.rollout import vllm
from tests.rollout.vllm_engines import ATTENTION, LONG, LONGEST, SHORT, begun, build
from tests.tiny import make_model

pytestmark = pytest.mark.slow(seconds=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), seed=3, max_position_embeddings=LONGEST, **ATTENTION)


def test_a_closed_engine_fails_its_callers(folder, tokenizer):
    engine = build(folder, tokenizer)

    async def close():
        task = await begun(engine)
        await engine.close()
        for waiting in (task, engine.generate([SHORT])):
            with pytest.raises(EngineError, match="closed"):
                await waiting
        await engine.close()

    asyncio.run(close())


def test_a_model_that_vllm_cannot_run_is_rejected_at_start(tokenizer, tmp_path):
    with pytest.raises(RolloutError, match=r"did not start.*head_dim=8"):
        build(make_model(tmp_path, head_dim=8, max_position_embeddings=LONGEST), tokenizer)


def test_an_error_in_a_step_reaches_all_callers(folder, tokenizer, monkeypatch):
    broken = build(folder, tokenizer)

    def step():
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(broken._engine, "step", step)

    async def fail():
        waiting = [broken.generate([SHORT]), broken.generate([LONG])]
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, RolloutError) and "no such kernel" in str(error) for error in errors)
        with pytest.raises(RolloutError, match="no such kernel"):
            await broken.health()
        await broken.close()

    asyncio.run(fail())


def test_a_missing_model_is_rejected(tokenizer, tmp_path):
    with pytest.raises(RolloutError, match="did not start"):
        build(str(tmp_path / "nothing"), tokenizer)


def test_torch_in_a_folder_with_a_space_disables_compilation(folder, tokenizer, monkeypatch, capfd):
    monkeypatch.setattr(vllm, "TORCH", "/an environment/torch")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    engine = build(folder, tokenizer)
    assert "without torch.compile" in capfd.readouterr().err
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    asyncio.run(engine.generate([SHORT]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    asyncio.run(engine.close())


@pytest.mark.slow(seconds=8)
def test_steps_without_tokens_end_the_wait(folder, tokenizer, monkeypatch):
    """A scheduler that has no memory for any request keeps stepping forever."""
    engine = build(folder, tokenizer, engine_timeout=60.0)

    async def run():
        assert len((await engine.generate([SHORT]))[0].token_ids) == 3
        engine._watch.seconds = 1.0  # the first generation, which compiles, may take longer
        monkeypatch.setattr(engine._engine, "step", lambda: time.sleep(0.01) or [])
        with pytest.raises(EngineError, match=r"vLLM hangs: no progress for .* while generating 1 request, with 0"):
            await engine.generate([SHORT])
        with pytest.raises(EngineError, match="vLLM hangs"):
            await engine.pause(drain=True)
        await engine.close()
        assert not engine._thread.is_alive()  # it has recovered; a thread that ends with the process could abort it

    asyncio.run(run())
