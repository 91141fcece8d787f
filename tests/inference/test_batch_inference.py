"""Every task of batch_inference against expected rows: in one process, in several, and after a kill."""

import asyncio
import gc
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.errors import ConfigError, RolloutError
from openrlhf.inference.generate import own_devices, stream
from openrlhf.rl.reward_models import OutcomeRewardModel
from tests import plain_transformers as plain
from tests.commands import (
    DEADLINE,
    FAST,
    as_argv,
    command_environ,
    run_command,
    start_command,
    start_two_ranks,
    wait_until,
)
from tests.tiny import make_model
from tests.toy_data import PAIRS, STEPS, pairs, steps, write_rows
from tests.warm import kill, warm_children

WORDS = ["a", "hello", "the cat", "a", "x" * 20, "1+1=", "what is it"]  # the first appears twice
SHORT = {"max_new_tokens": 12, "input_template": "{}="}


def read(path="out.jsonl"):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def prompts(words=WORDS):
    return write_rows(Path("prompts.jsonl"), [{"input": word} for word in words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with heads wide enough for vLLM on a CPU."""
    return make_model(tmp_path_factory.mktemp("sharp"), seed=3, sharp=True, head_dim=32)


@pytest.fixture
def infer(folder):
    """Return a function that runs the command and returns the rows it wrote."""

    def start(task="generate", **flags):
        run_command("batch_inference", {"eval_task": task, "pretrain": folder, "output_path": "out.jsonl"} | flags)
        return read(flags.get("output_path", "out.jsonl"))

    return start


def greedy(folder, prompt, **more):
    model, tokenizer = plain.load(folder)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, **more)
    return tokenizer.decode(made[0, ids.shape[1] :])


def test_greedy_answers_equal_plain_transformers(infer, folder):
    rows = infer(dataset=prompts(), greedy_sampling=True, micro_batch_size=3, **SHORT)
    expected = [(f"{word}=", greedy(folder, f"{word}="), number) for number, word in enumerate(WORDS)]
    assert [(row["input"], row["output"], row["index"]) for row in rows] == expected


def test_the_repetition_penalty_equals_plain_transformers(infer, folder):
    rows = infer(dataset=prompts(), greedy_sampling=True, repetition_penalty=1.3, **SHORT)
    assert [row["output"] for row in rows] == [greedy(folder, f"{word}=", repetition_penalty=1.3) for word in WORDS]


def test_several_answers_per_prompt_are_adjacent(infer):
    rows = infer(dataset=prompts(), best_of_n=3, **SHORT)
    assert [row["index"] for row in rows] == [number for number in range(len(WORDS)) for _ in range(3)]
    answers = [tuple(row["output"] for row in rows[start : start + 3]) for start in range(0, len(rows), 3)]
    assert len(set(answers)) == len(WORDS)  # also for the two prompts with the same text
    assert len({row["output"] for row in rows[:3]}) > 1


def test_a_slice_keeps_its_row_numbers(infer):
    whole = infer(dataset=prompts(), **SHORT)
    assert infer(dataset=prompts(), iter=1, rollout_batch_size=3, **SHORT) == whole[3:6]
    assert infer(dataset=prompts(), iter=2, rollout_batch_size=3, **SHORT) == whole[6:]


def test_a_conditional_prompt_contains_the_target_reward(infer):
    rows = infer(dataset=prompts(["a", "b "]), enable_csft=True, csft_prompt="<rm_score>: 9.00", max_new_tokens=2)
    assert [row["input"] for row in rows] == ["a <rm_score>: 9.00 ", "b <rm_score>: 9.00 "]


def test_prompts_go_through_the_chat_template(infer):
    data = write_rows(Path("chat.jsonl"), [{"input": [{"role": "user", "content": "hi"}]}, {"input": "yo"}])
    rows = infer(dataset=data, apply_chat_template=True, max_new_tokens=2)
    assert [row["input"] for row in rows] == ["<u>hi<a>", "<u>yo<a>"]


def test_empty_prompts_are_counted_and_the_others_keep_their_numbers(infer, capfd):
    rows = infer(dataset=prompts(["a", "", "b"]), max_new_tokens=2)
    assert [row["index"] for row in rows] == [0, 2]
    assert "dropped 1 of 3 rows: 1 with an empty prompt" in capfd.readouterr().err


def test_an_answer_ends_at_the_models_context_length(infer, folder, capfd):
    rows = infer(dataset=prompts(["x" * 600]), max_new_tokens=1000, prompt_max_len=500)
    stderr = capfd.readouterr().err
    assert "the model supports 512" in stderr
    assert "rows longer than the 500 tokens: 1 of 1; 100 tokens are cut off at the start" in stderr
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer(rows[0]["output"]).input_ids) <= 12


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A reward model as train_rm saves it, with the mean and standard deviation of its scores."""
    root = tmp_path_factory.mktemp("reward")
    base = make_model(root / "base")
    data = {
        "dataset": write_rows(root / "pairs.jsonl", pairs(64)),
        "eval_dataset": write_rows(root / "held_out.jsonl", pairs(16, seed=1)),
    }
    paths = {"pretrain": base, "save_path": str(root / "rm"), "ckpt_path": str(root / "ckpt")}
    run_command("train_rm", FAST | PAIRS | data | paths)
    return str(root / "rm")


def answer_rows(count=4, per_prompt=3):
    """Return answers to a few prompts, two of which have the same text."""
    made = pairs(count * per_prompt)
    return [
        {"input": "same" if row < 2 * per_prompt else f"p{row // per_prompt}", "output": pair["chosen"]}
        | {"index": 10 + row // per_prompt}
        for row, pair in enumerate(made)
    ]


def test_rewards_are_normalised_plain_transformers_scores(infer, reward_model, capfd):
    data = answer_rows()
    rows = infer("rm", pretrain=reward_model, dataset=write_rows(Path("in.jsonl"), data), micro_batch_size=5)
    config = json.loads((Path(reward_model) / "config.json").read_text())
    scores = plain.scores(reward_model, [row["input"] + row["output"] for row in data])
    expected = ((scores - config["mean"]) / config["std"]).tolist()
    assert [row.pop("reward") for row in rows] == pytest.approx(expected, abs=1e-5)
    assert rows == data
    assert "reward: mean" in capfd.readouterr().err


def test_a_reward_model_saved_by_plain_transformers_can_score_answers(infer, tmp_path):
    base = make_model(tmp_path / "base")
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=1).save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "other")
    data = [{"question": "abc", "answer": "de"}, {"question": "f", "answer": "ghijk"}]
    keys = {"input_key": "question", "output_key": "answer", "input_template": "{}="}
    rows = infer("rm", pretrain=str(tmp_path / "other"), dataset=write_rows(Path("in.jsonl"), data), **keys)
    scores = plain.scores(tmp_path / "other", ["abc=de", "f=ghijk"]).tolist()
    assert [row["reward"] for row in rows] == pytest.approx(scores, abs=1e-5)
    assert [(row["input"], row["output"]) for row in rows] == [("abc=", "de"), ("f=", "ghijk")]
    assert all("index" not in row for row in rows)


def test_a_process_reward_model_scores_by_its_lowest_step(infer, tmp_path, models):
    data = write_rows(tmp_path / "steps.jsonl", steps(48))
    run_command(
        "train_prm", FAST | STEPS | {"pretrain": models(), "save_path": "prm", "ckpt_path": "prm_ckpt", "dataset": data}
    )
    texts = [row["input"] for row in steps(6, seed=1)]
    data = write_rows(Path("in.jsonl"), [{"input": text[:2], "output": text[2:]} for text in texts])
    rows = infer("rm", pretrain="./prm", dataset=data)
    model, tokenizer = plain.load("./prm")
    marks = tokenizer.convert_tokens_to_ids(["+", "-"])
    for text, row in zip(texts, rows, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            positive = model(ids).logits[0][:, marks].softmax(-1)[:, 0]
        assert row["reward"] == pytest.approx(positive[1::2].min().item(), abs=1e-5)


def test_post_processors_write_their_rows(infer, reward_model):
    data = write_rows(Path("in.jsonl"), answer_rows())
    flags = {"pretrain": reward_model, "dataset": data}
    scored = infer("rm", **flags)
    groups = [scored[start : start + 3] for start in range(0, len(scored), 3)]
    best = [max(group, key=lambda row: row["reward"]) for group in groups]
    worst = [min(group, key=lambda row: row["reward"]) for group in groups]
    assert infer("rm", post_processor="rs", **flags) == best
    assert infer("rm", post_processor="iter_dpo", **flags) == [
        {
            "prompt": good["input"],
            "chosen": good["output"],
            "chosen_reward": good["reward"],
            "rejected": bad["output"],
            "rejected_reward": bad["reward"],
            "index": good["index"],
        }
        for good, bad in zip(best, worst, strict=True)
    ]
    conditional = infer("rm", post_processor="csft", **flags)
    assert conditional == [row | {"input": f"{row['input']} <rm_score>: {row['reward']:.2f} "} for row in scored]


def generation(folder, output):
    return {"eval_task": "generate", "pretrain": folder, "output_path": output}


def command(folder, output, **flags):
    return as_argv(generation(folder, output) | flags)


@pytest.mark.slow(seconds=12)
def test_two_processes_write_the_same_rows_as_one(infer, folder, reward_model, tmp_path):
    flags = {"dataset": prompts(WORDS * 3), "best_of_n": 2, **SHORT}
    alone = infer(**flags)
    words = ["-m", "openrlhf.cli.batch_inference"]
    code = start_two_ranks(tmp_path, *words, *command(folder, "both.jsonl", **flags)).wait(timeout=DEADLINE)
    assert code == 0, (tmp_path / "output.txt").read_text()[-3000:]
    assert read("both.jsonl") == alone
    assert not Path("both.jsonl.parts").exists()

    scored = {"eval_task": "rm", "pretrain": reward_model, "dataset": "both.jsonl", "post_processor": "rs"}
    best = infer(scored.pop("eval_task"), **scored)
    words += command(reward_model, "best.jsonl", **scored, eval_task="rm")
    assert start_two_ranks(tmp_path, *words).wait(timeout=DEADLINE) == 0, (tmp_path / "output.txt").read_text()[-3000:]
    for one, other in zip(read("best.jsonl"), best, strict=True):
        assert one.pop("reward") == pytest.approx(other.pop("reward"), abs=1e-5)
        assert one == other


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_resumes_without_losing_or_repeating_rows(sent, infer, folder, tmp_path):
    long = {"dataset": prompts([f"{word}{number}" for number in range(16) for word in WORDS]), "input_template": "{}="}
    flags = long | {"best_of_n": 2, "max_new_tokens": 24, "micro_batch_size": 4}
    whole = infer(**flags)
    process = start_command(tmp_path, "batch_inference", generation(folder, "cut.jsonl") | flags)
    part = Path("cut.jsonl.parts/rank0.jsonl")
    wait_until(process, lambda: part.is_file() and len(part.read_text(encoding="utf-8").splitlines()) > 20)
    kill(process.pid) if sent == signal.SIGKILL else process.send_signal(sent)
    process.wait(timeout=DEADLINE)
    assert not Path("cut.jsonl").exists()
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert "run the same command to resume" in (tmp_path / "stderr.txt").read_text()
    done = part.read_text(encoding="utf-8").splitlines()
    assert 20 < len(done) < len(whole)
    with part.open("a", encoding="utf-8") as file:
        file.write('{"number": 1, "row": {"inp')  # half a line
    marked = json.dumps(json.loads(done[0]) | {"row": {"output": "not made again"}})
    part.write_text(part.read_text(encoding="utf-8").replace(done[0], marked, 1), encoding="utf-8")
    rows = infer(**flags, output_path="cut.jsonl")
    assert [row["output"] for row in rows].count("not made again") == 1
    expected = list(whole)
    expected[json.loads(done[0])["number"]] = {"output": "not made again"}
    assert rows == expected
    assert not Path("cut.jsonl.parts").exists()


LAUNCHER = """
import os, subprocess, sys
alone = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
subprocess.Popen([sys.executable, "-m", "openrlhf.cli.batch_inference", *sys.argv[1:]], env=os.environ | alone).wait()
"""


@pytest.mark.slow(seconds=8)
def test_a_process_does_not_outlive_its_launcher(folder):
    """The process has finished its share and waits for the others, which never start."""
    flags = {"dataset": prompts(), **SHORT}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *command(folder, "half.jsonl", **flags)],
        stderr=subprocess.PIPE,
        env=command_environ(),
    )
    part = Path("half.jsonl.parts/rank1.jsonl")
    wait_until(
        launcher, lambda: part.is_file() and len(part.read_text(encoding="utf-8").splitlines()) == len(WORDS) // 2
    )
    launcher.kill()
    launcher.communicate(timeout=DEADLINE)  # returns when no process holds the pipe


@pytest.fixture
def interrupted_flags(infer, reward_model, monkeypatch):
    """The flags of a scoring run that was interrupted after two batches."""
    flags = {"pretrain": reward_model, "dataset": write_rows(Path("in.jsonl"), answer_rows()), "micro_batch_size": 4}
    real, calls = OutcomeRewardModel.score_rows, []

    def interrupted(self, rows):
        calls.append(rows)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(OutcomeRewardModel, "score_rows", interrupted)
        with pytest.raises(SystemExit) as stop:
            infer("rm", **flags)
    assert stop.value.code == 130
    return flags


def test_a_resumed_run_may_change_speed_and_post_processing_flags(interrupted_flags, infer, capfd):
    rows = infer("rm", **interrupted_flags | {"micro_batch_size": 1, "post_processor": "rs"})
    assert "resuming: 8 of 12 rows" in capfd.readouterr().err
    assert len(rows) == 4


def test_a_resumed_run_with_other_flags_is_rejected(interrupted_flags, infer, reward_model, capfd):
    with pytest.raises(SystemExit) as stop:
        infer("rm", **interrupted_flags | {"max_len": 99})
    assert stop.value.code == 2
    assert "--max_len 2048 -> 99" in capfd.readouterr().err
    write_rows(Path("in.jsonl"), answer_rows()[:-1])
    with pytest.raises(SystemExit):
        infer("rm", **interrupted_flags)
    stderr = capfd.readouterr().err
    assert "the content of --dataset" in stderr
    assert "rm -r out.jsonl.parts to start over" in stderr
    assert not Path("out.jsonl").exists()


@pytest.mark.slow(seconds=10)
def test_vllm_gives_the_answers_of_transformers(infer):
    flags = {"dataset": prompts(WORDS * 4), "greedy_sampling": True, **SHORT}
    expected = infer(**flags)
    assert infer("generate_vllm", **flags, max_num_seqs=4) == expected
    many = infer("generate_vllm", **flags | {"greedy_sampling": None, "best_of_n": 2, "max_num_seqs": 8})
    assert [row["index"] for row in many] == [number for number in range(len(WORDS) * 4) for _ in range(2)]
    assert len({row["output"] for row in many}) > len(WORDS)
    penalised = flags | {"repetition_penalty": 1.3}
    assert infer("generate_vllm", **penalised) == infer(**penalised)


@pytest.mark.slow(seconds=30)
def test_engines_on_ray_give_the_same_answers(infer, monkeypatch):
    for name, value in warm_children().items():
        monkeypatch.setenv(name, value)
    flags = {"dataset": prompts(WORDS * 4), "greedy_sampling": True, **SHORT}
    assert infer("generate_vllm", **flags, vllm_num_engines=2, max_num_seqs=4) == infer(**flags)


def test_an_engine_that_fails_every_request_is_reported_once(caplog):
    class BrokenEngine:
        async def generate(self, requests):
            raise RolloutError("no such request")

    def store(place, completion):
        raise AssertionError("no request was answered")

    with pytest.raises(RolloutError, match="no such request"):
        asyncio.run(stream(BrokenEngine(), range(3), store, window=3))
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize(
    ("requested", "rank", "neighbours", "expected"),
    [(None, 0, 1, "0123"), (2, 0, 1, "01"), (None, 1, 2, "23"), (1, 3, 4, "3"), (1, 1, 2, "1")],
)
def test_processes_of_one_machine_share_its_devices(requested, rank, neighbours, expected):
    assert own_devices("0123", requested, rank, neighbours) == list(expected)


def test_too_few_devices_are_rejected():
    with pytest.raises(ConfigError, match=r"expected 8, --tp_size 4 for each process .* \(2\), got 4"):
        own_devices("0123", 4, 1, 2)


MISTAKES = {
    "--eval_task is not given": {"eval_task": None},
    "expected generate_vllm, generate or rm, got 'generates'": {"eval_task": "generates"},
    "nowhere.jsonl: no such file": {"dataset": "nowhere.jsonl"},
    "--post_processor rs needs rewards": {"post_processor": "rs"},
    "--iter 3 with --rollout_batch_size 4 begins at row 12": {"iter": 3, "rollout_batch_size": 4},
    "is a folder, but rows are written to a file": {"output_path": "."},
    "is the dataset itself": {"output_path": "./prompts.jsonl"},
    "no field 'question'; the row has 'input'": {"input_key": "question"},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_wrong_inputs_are_reported(message, infer, capfd):
    with pytest.raises(SystemExit) as stop:
        infer(**{"dataset": prompts(), "task": "generate"} | MISTAKES[message])
    assert stop.value.code == 2
    assert message in capfd.readouterr().err
    assert not list(Path().glob("*.parts"))
