"""Training functions, called as in a script or a notebook, on tiny models."""

import asyncio
import doctest
import gc
import json
import os
import signal
import threading
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
import torch
from transformers.utils import logging

import openrlhf
from openrlhf import StopTraining, generate, train_ppo, train_sft
from openrlhf.api import generation, training
from openrlhf.errors import BackendError, DataError, RewardError
from openrlhf.training import checkpoint
from openrlhf.utils.agent import AgentInstanceBase
from tests.commands import FAST
from tests.rl.toy_task import LENGTH, SMALL, make_prompts
from tests.toy_data import ANSWERS, answers, write_rows

pytestmark = pytest.mark.slow(seconds=1)
WATCHDOG = 300  # seconds


@pytest.fixture
def sft(models):
    """Return a function that fine-tunes the tiny model in memory; its keywords override the defaults here."""

    def start(name="sft", **keywords):
        paths = {"pretrain": models(), "save_path": name, "ckpt_path": f"{name}_ckpt"}
        return train_sft(**{"dataset": answers(48)} | paths | FAST | ANSWERS | keywords)

    return start


@pytest.fixture
def ppo(models):
    """Return a function that trains the tiny model with GRPO; its keywords override the defaults here."""

    def start(name="grpo", **keywords):
        paths = {"pretrain": models(), "save_path": name, "ckpt_path": f"{name}_ckpt"}
        return train_ppo(**{"prompt_data": make_prompts(16), "reward": lower_case} | paths | SMALL | keywords)

    return start


def lower_case(queries, prompts, labels):
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    return [sum(letter.islower() for letter in answer) / LENGTH for answer in answers]


@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("module", [training, generation])
def test_examples_in_docstrings(module, models):
    Path("model").symlink_to(models())
    done = doctest.testmod(module, extraglobs={name: getattr(openrlhf, name) for name in openrlhf.__all__})
    assert done.failed == 0
    assert done.attempted > 0


def without_timings(record):
    return record.kind, record.step, {name: value for name, value in record.metrics.items() if "timing" not in name}


def test_a_function_trains_like_its_command(sft, train, tmp_path):
    records = []
    result = sft(on_step=records.append, eval_dataset=answers(8, seed=1))
    ran = train("train_sft", **ANSWERS, dataset=write_rows(tmp_path / "a.jsonl", answers(48)))
    assert result.curve("gpt_loss")[1] == ran.train("gpt_loss")
    assert result.history == tuple(records)
    assert [record.kind for record in records] == ["eval", "train", "train", "train", "eval"]
    assert [record.step for record in records] == [0, 1, 2, 3, 3]
    assert result.metrics == records[3].metrics
    assert result.evaluation == records[4].metrics
    assert (result.steps, result.run_dir, os.fspath(result)) == (3, Path("sft/run"), "sft")
    assert "gpt_loss" in str(result)
    assert "<td>sft/run</td>" in result._repr_html_()
    with pytest.raises(KeyError, match="no train metric 'reward': expected one of gpt_loss"):
        result.curve("reward")
    with pytest.raises(KeyError, match=r"no train metric 'eval_loss'.* Try: curve\('eval_loss', kind='eval'\)"):
        result.curve("eval_loss")
    assert result.curve("eval_loss", kind="eval")[0] == [0, 3]


def numbers(result):
    """Return the history of a run without the times, which differ."""
    return [
        (row.kind, row.step, {name: value for name, value in row.metrics.items() if not name.startswith("timing/")})
        for row in result.history
    ]


def test_rows_in_memory_train_like_a_file(sft, tmp_path):
    file = sft("file", dataset=write_rows(tmp_path / "a.jsonl", answers(48)))
    table = datasets.Dataset.from_list(answers(48))
    for name, rows in {"list": answers(48), "table": table, "splits": datasets.DatasetDict(train=table)}.items():
        assert numbers(sft(name, dataset=rows)) == numbers(file)
    flags = json.loads(Path("list/run/config.json").read_text())["flags"]
    assert flags["dataset"].startswith("in memory (48 rows; ")


def test_a_run_on_rows_in_memory_resumes_and_notices_other_rows(sft, capsys):
    whole = sft("whole", max_epochs=2)
    sft(save_steps=3, max_epochs=2, on_step=stop_after(4))
    assert [path.name for path in sft(max_steps=3, save_steps=3).checkpoints] == ["global_step3"]
    capsys.readouterr()
    resumed = sft(save_steps=3, max_epochs=2, load_checkpoint=True)
    assert "--dataset" not in capsys.readouterr().err
    assert numbers(resumed) == numbers(whole)
    sft(max_epochs=2, dataset=answers(48, seed=1), load_checkpoint=True, save_steps=3)
    assert "flags that changed since then: --dataset in memory (48 rows; " in capsys.readouterr().err


def stop_after(step):
    def on_step(record):
        if record.step == step:
            raise StopTraining("enough")

    return on_step


def test_a_callback_ends_training_early_and_the_model_is_saved(sft, ppo, capsys):
    for result in (sft(max_epochs=5, on_step=stop_after(2)), ppo(num_episodes=5, on_step=stop_after(2))):
        assert result.steps == result.history[-1].step == 2
        assert (result.model / "config.json").exists()
    assert capsys.readouterr().err.count("step 2: training ends here: enough") == 2


@pytest.mark.parametrize("command", ["sft", "ppo"])
def test_garbage_collection_skips_the_objects_from_before_training(command, request):
    """A collection over all imported objects would interrupt a step."""
    counts = []
    request.getfixturevalue(command)(on_step=lambda record: counts.append((record.step, gc.get_freeze_count())))
    assert all(frozen > 100_000 for step, frozen in counts if step > 0)
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("kind", [LookupError, FileNotFoundError])
def test_an_error_in_a_callback_ends_the_run(sft, kind):
    def on_step(record):
        raise kind("mine")

    with pytest.raises((LookupError, BackendError), match="mine"):
        sft(on_step=on_step)
    assert sft().steps == 3  # the folders are free again


def test_runs_in_one_process_do_not_affect_each_other(sft, ppo, models):
    """Different models, a failed run in between, and settings of the process that a run changes."""
    environment = dict(os.environ)
    logging.enable_progress_bar()
    first = ppo("first")
    with pytest.raises(DataError, match="no field 'question'"):
        sft(input_key="question")
    with pytest.raises(RewardError, match="reward=broken raised ZeroDivisionError"):
        ppo("broken", reward=broken)
    sft("other", pretrain=models("qwen2"), full_determinism=True)
    again = ppo("again")
    assert list(map(without_timings, again.history)) == list(map(without_timings, first.history))
    assert dict(os.environ) == environment
    assert logging.is_progress_bar_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def broken(queries, prompts, labels):
    return 1 / 0


def test_a_run_in_a_notebook_equals_one_in_a_script(ppo):
    """A notebook calls the function while its event loop runs."""

    async def cell():
        return ppo("cell")

    script = ppo("script")
    assert list(map(without_timings, asyncio.run(cell()).history)) == list(map(without_timings, script.history))


def test_an_interrupt_in_a_notebook_leaves_a_checkpoint_to_resume_from(ppo, capfd):
    def on_step(record):
        if record.step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    async def cell():
        ppo(num_episodes=50, on_step=on_step)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    assert "stopping after this step, with a checkpoint" in capfd.readouterr().err
    (stopped,) = checkpoint.finished(Path("grpo_ckpt"))
    more = checkpoint.step_of(stopped) + 1
    assert ppo(num_episodes=50, load_checkpoint=True, max_steps=more).history[-1].step == more < 100


def test_a_run_in_another_thread_works(sft):
    results = []
    thread = threading.Thread(target=lambda: results.append(sft()))
    thread.start()
    thread.join(WATCHDOG)
    assert results[0].steps == 3


def test_a_reward_function_may_be_async_and_change_the_callers_objects(ppo):
    seen = []

    async def score(queries, prompts, labels):
        seen.append(labels)
        await asyncio.sleep(0)
        return {"rewards": lower_case(queries, prompts, labels), "extra_logs": {"mine": [1.0] * len(queries)}}

    result = ppo(reward=score)
    assert result.metrics["mine"] == 1.0
    assert seen[-1] == ["x"] * SMALL["n_samples_per_prompt"]
    flags = json.loads((result.run_dir / "config.json").read_text())["flags"]
    assert flags["remote_rm_url"] == "in memory (score)"
    plain = ppo("plain")
    assert result.curve("reward") == plain.curve("reward")


class SecondChance(AgentInstanceBase):
    """Asks once more; every lower-case letter is worth a little."""

    def __init__(self):
        self.turns = 0

    async def step(self, states, **kwargs):
        self.turns += 1
        letters = sum(letter.islower() for letter in states["action_text"])
        return {"rewards": letters / LENGTH, "environment_feedback": " again: ", "done": self.turns == 2}


def test_an_agent_class_plays_several_turns(ppo):
    result = ppo(agent=SecondChance, reward=None, generate_max_len=24, max_steps=1)
    assert result.steps == 1
    rows = pq.read_table(result.run_dir / "rollouts" / "step_000001.parquet").to_pylist()
    assert any(" again: " in row["response"] for row in rows)


def test_a_dry_run_returns_a_result_without_steps(sft, tmp_path):
    result = sft(dry_run=True)
    assert (result.steps, result.history) == (0, ())
    assert list(tmp_path.iterdir()) == []


def test_answers_come_in_the_order_of_the_prompts(sft, models):
    result = sft(max_epochs=8)
    prompts = [f"{row['input']}=" for row in answers(6, seed=3)]
    keywords = {"max_new_tokens": 2, "greedy_sampling": True}
    greedy = generate(result, prompts, **keywords)
    assert generate(result, prompts[::-1], **keywords) == greedy[::-1]
    assert len(set(greedy)) > 1
    twice = generate(result, prompts[:2], best_of_n=2, **keywords)
    assert twice == [greedy[0], greedy[0], greedy[1], greedy[1]]
    assert generate(result, []) == []
    with pytest.raises(ValueError, match=r"prompts= is a string.*Try: prompts=\[text\]"):
        generate(result, "abc=")


def test_prompts_may_be_conversations(models):
    conversation = [{"role": "user", "content": "ab"}]
    keywords = {"max_new_tokens": 3, "greedy_sampling": True}
    spelled = generate(models(), ["<u>ab<a>"], **keywords)
    assert generate(models(), [conversation, "ab"], apply_chat_template=True, **keywords) == spelled * 2
