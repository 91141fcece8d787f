"""Files that a run writes: metrics under their public names, flags and versions; and what dashboards get."""

import json
import shlex
import sqlite3
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from openrlhf.api.start import prepare
from openrlhf.monitor import LoggedSample, Monitor
from openrlhf.training.metric_sinks import Trackio, Wandb
from tests.rl.toy_task import SMALL, make_prompts, read_rollouts, task_flags
from tests.toy_data import ANSWERS, PAIRS, STEPS, answers, dataset_flags, pairs, steps, verdicts

TRAIN = {"lr", "grad_norm", "loss_mean"}
CASES = {
    "train_sft": (ANSWERS, answers(8), {"gpt_loss"}, {"eval gpt_loss"}),
    "train_rm": (
        PAIRS,
        pairs(8),
        {"loss", "acc", "chosen_reward", "reject_reward", "acc_mean"},
        {"eval_loss", "acc_mean", "reward_mean", "reward_std"},
    ),
    "train_dpo": (
        PAIRS | {"nll_loss_coef": 0.1},
        pairs(8),
        {"loss", "acc", "chosen_reward", "reject_reward", "acc_mean", "nll_loss"},
        {"eval_loss", "acc_mean"},
    ),
    "train_kto": (
        ANSWERS,
        verdicts(8),
        {"kto_loss", "chosen_reward", "reject_reward", "kl"},
        {"eval_loss", "chosen_reward", "reject_reward"},
    ),
    "train_kd": (ANSWERS, answers(8), {"gpt_loss", "distil_loss"}, {"eval gpt_loss"}),
    "train_prm": (STEPS, steps(8), {"prm_loss", "acc", "acc_mean"}, {"eval prm_loss", "eval acc"}),
}


@pytest.mark.parametrize("command", CASES)
def test_metrics_keep_their_names(command, tmp_path, train, models):
    flags, rows, train_names, eval_names = CASES[command]
    if command == "train_kd":
        flags = flags | {"teacher_model": models(seed=5)}
    ran = train(command, **flags, **dataset_flags(tmp_path, rows, rows[:3]), eval_split="train", train_batch_size=4)
    assert [(line["kind"], line["step"]) for line in ran.metrics] == [
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 2),
    ]
    assert train_names | TRAIN <= set(ran.metrics[1])
    assert eval_names <= set(ran.metrics[0])
    assert not any(name.startswith("_") for line in ran.metrics for name in line)


@pytest.mark.parametrize(
    ("command", "flags", "rows", "suggested"),
    [
        ("train_sft", ANSWERS, answers(8), ["view", "interactive_chat"]),
        ("train_sft", ANSWERS | {"lora_rank": 2, "save_path": "my adapter"}, answers(8), ["view", "lora_combiner"]),
        ("train_rm", PAIRS | {"run_dir": "elsewhere"}, pairs(8), ["view", "serve_rm"]),
        ("train_prm", STEPS, steps(8), ["view"]),
    ],
    ids=["sft", "lora", "rm", "prm"],
)
def test_a_run_ends_with_commands_that_work_on_its_results(command, flags, rows, suggested, tmp_path, train, capsys):
    flags = flags | dataset_flags(tmp_path, rows, rows[:2])
    train(command, **flags, dry_run=True)
    assert "next: " not in capsys.readouterr().err
    train(command, **flags)
    *lines, last = capsys.readouterr().err.splitlines()
    assert not any("next: " in line for line in lines)
    commands = [shlex.split(line) for line in last.removeprefix("openrlhf: next: ").split(", or ")]
    assert [words[:2] for words in commands] == [["openrlhf", name] for name in suggested]
    for _, name, *argv in commands:
        prepare(name, argv)  # checks that the folders exist and hold what the command needs


def test_the_learning_rate_warms_up_and_decays(tmp_path, train):
    flags = {"lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": 0.2, "learning_rate": 1e-3}
    ran = train("train_sft", **ANSWERS, **dataset_flags(tmp_path, answers(20), answers(2)), train_batch_size=2, **flags)
    rates = ran.train("lr")
    assert rates[:3] == pytest.approx([0.0, 0.5e-3, 1e-3])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 1e-4 < rates[-1] < 2e-4


def test_metrics_and_evaluations_follow_their_intervals(tmp_path, train):
    flags = {"train_batch_size": 2, "logging_steps": 2, "eval_steps": 3}
    ran = train("train_sft", **ANSWERS, **dataset_flags(tmp_path, answers(10), answers(2)), **flags)
    assert [(line["kind"], line["step"]) for line in ran.metrics] == [
        ("eval", 0),
        ("train", 2),
        ("eval", 3),
        ("train", 4),
        ("eval", 5),  # the saved model is evaluated
    ]


@pytest.mark.slow(seconds=7)
def test_flags_and_versions_are_recorded_without_api_keys(tmp_path, train, wandb_offline):
    files = dataset_flags(tmp_path, answers(8), answers(2))
    flags = {"use_wandb": "secret" * 8, "run_dir": "./elsewhere", "wandb_project": "toys", "save_steps": 1}
    train("train_sft", **ANSWERS, **files, **flags)
    text = (tmp_path / "elsewhere" / "config.json").read_text()
    content = json.loads(text)
    assert content["flags"]["train_batch_size"] == 16
    assert content["flags"]["use_wandb"] == "***"
    assert {"python", "torch", "transformers", "openrlhf"} <= set(content["versions"])
    assert "revision" in content
    assert (tmp_path / "elsewhere" / "metrics.jsonl").is_file()
    assert not (tmp_path / "out" / "run").exists()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"state.json", "metrics.jsonl"} <= {path.name for path in written}
    assert [path for path in written if path.suffix == ".wandb"]
    assert [path for path in written if b"secretsecret" in path.read_bytes()] == []


@pytest.mark.slow(seconds=4)
def test_wandb_offline_accepts_true_instead_of_a_key(tmp_path, train, wandb_offline):
    train("train_sft", **ANSWERS, **dataset_flags(tmp_path, answers(8), answers(2)), use_wandb="True")
    assert list((tmp_path / "wandb").rglob("*.wandb"))


@pytest.fixture
def trackio_folder(tmp_path, monkeypatch):
    """The folder of Trackio's files; Trackio reads the variable when it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "trackio"


def test_trackio_gets_metrics_and_samples(tmp_path, train, trackio_folder):
    flags = {"use_trackio": "toys", "wandb_run_name": "mine", "max_steps": 2, "learning_rate": None, "max_epochs": 1}
    ran = train("train_ppo", **SMALL | task_flags(tmp_path, make_prompts(16)) | flags)
    with sqlite3.connect(trackio_folder / "toys.db") as database:
        logged = [json.loads(row[0]) for row in database.execute("SELECT metrics FROM metrics WHERE run_name = 'mine'")]
    rewards = [row["train/reward"] for row in logged if "train/reward" in row]
    assert rewards == pytest.approx(ran.train("reward"))
    tables = [row["train/samples"] for row in logged if "train/samples" in row]
    assert [len(table["_value"]) for table in tables] == [4, 4]  # the first group of each step
    recorded = read_rollouts(ran, 1)[:4]
    shown = [(row["step"], row["prompt"], row["response"], row["reward"]) for row in tables[0]["_value"]]
    assert shown == [(1, row["prompt"]["text"], row["response"], row["reward"]) for row in recorded]


@pytest.mark.slow(seconds=5)
def test_wandb_gets_a_table_of_samples(tmp_path, train, wandb_offline):
    flags = {"use_wandb": "True", "max_steps": 1, "learning_rate": None, "max_epochs": 1}
    ran = train("train_ppo", **SMALL | task_flags(tmp_path, make_prompts(8)) | flags)
    (table,) = (tmp_path / "wandb").rglob("*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["step", "prompt", "response", "reward", "score", "truncated"]
    assert [row[2] for row in content["data"]] == [row["response"] for row in read_rollouts(ran, 1)[:4]]


@pytest.mark.slow(seconds=2)
def test_a_failing_dashboard_is_reported_and_the_run_continues(wandb_offline, trackio_folder, capfd):
    import trackio
    import wandb
    from wandb.sdk.lib.module import unset_globals

    for moment in ("log", "log_samples", "close"):
        sink = Wandb("True", name="mine", project="toys", group=None, org=None, config={})
        wandb.teardown()  # its service is gone
        with Monitor([sink]) as monitor:
            if moment == "log":
                monitor.log("train", 1, {"loss": 1.0})
            elif moment == "log_samples":
                monitor.log_samples(1, [LoggedSample("2+2=", "4", reward=1.0, score=1.0, truncated=False)])
    assert capfd.readouterr().err.count("no more metrics are sent to Wandb: ") == 3
    unset_globals()  # these runs never finished, and later tests would take them for active ones
    with Monitor([Trackio("toys", name="mine", config={})]):
        trackio.finish()
    assert "no more metrics are sent to Trackio: Call trackio.init()" in capfd.readouterr().err


def test_tensorboard_gets_every_metric(tmp_path, train):
    flags = {"use_tensorboard": "./tb", "wandb_run_name": "mine"}
    ran = train("train_sft", **ANSWERS, **dataset_flags(tmp_path, answers(8), answers(2)), train_batch_size=4, **flags)
    events = EventAccumulator(str(tmp_path / "tb" / "mine")).Reload()
    assert {"train/gpt_loss", "train/lr", "eval/eval gpt_loss"} <= set(events.Tags()["scalars"])
    got = [(event.step, event.value) for event in events.Scalars("train/gpt_loss")]
    expected = list(enumerate(ran.train("gpt_loss"), start=1))
    assert [step for step, _ in got] == [step for step, _ in expected]
    assert [value for _, value in got] == pytest.approx([value for _, value in expected], rel=1e-6)
