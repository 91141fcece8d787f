"""`openrlhf preview COMMAND`: the flags of the command, its data on stdout, and no model."""

import re

import pytest
from transformers import LlamaConfig

from openrlhf.cli.main import main
from openrlhf.config.flags import flags_of
from openrlhf.config.preview import PREVIEWED, PreviewFlags
from openrlhf.config.wrapper import with_section
from tests.commands import as_argv
from tests.tiny import make_tokenizer
from tests.toy_data import ANSWERS, PAIRS, STEPS, answers, pairs, steps, verdicts, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a model folder without weights."""
    path = tmp_path_factory.mktemp("hollow")
    LlamaConfig().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


CASES = {
    "train_sft": (answers(12), ANSWERS, ["| daced=[[D</s>]]", "steps per epoch", "1  12 / --train_batch_size 128"]),
    "train_kd": (answers(12), ANSWERS, ["| daced=[[D</s>]]"]),
    "train_rm": (pairs(12), PAIRS, ["  rejected, 13 tokens, response: 7\n    | ynbiq=[[qvprpz</s>]]"]),
    "train_dpo": (pairs(12), PAIRS, ["  chosen, 12 tokens"]),
    "train_kto": (verdicts(12), ANSWERS, ["row 1, desirable", "row 2, undesirable"]),
    "train_prm": (steps(12), STEPS, ["[[#: +]]", "labelled tokens"]),
    "train_ppo": (answers(12), {"label_key": "output"}, ["row 1, label 'D'", "rollouts per pass"]),
    "train_ppo_ray": (answers(12), {"label_key": "output"}, ["row 1, label 'D'"]),
    "batch_inference": (answers(12), {"eval_task": "generate", "best_of_n": 2}, ["responses", "24  --best_of_n 2"]),
}


@pytest.mark.parametrize("command", PREVIEWED)
def test_each_command_shows_its_data(command, folder, tmp_path, capsys):
    rows, flags, expected = CASES[command]
    data = "prompt_data" if command.startswith("train_ppo") else "dataset"
    names = {"pretrain": folder, data: write_rows(tmp_path / "rows.jsonl", rows)}
    main(["preview", command, *as_argv(names | flags)])
    captured = capsys.readouterr()
    assert captured.out.startswith(f"--{data} ")
    for text in (*expected, "rows read", "tokens per row before truncation", "warnings"):
        assert text in captured.out
    assert captured.err == ""
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl"}


def test_evaluation_data_is_also_shown_and_rows_are_limited(folder, tmp_path, capsys):
    flags = {
        "pretrain": folder,
        "dataset": write_rows(tmp_path / "rows.jsonl", answers(12)),
        "eval_dataset": write_rows(tmp_path / "held_out.jsonl", answers(5, seed=1)),
        "rows": 1,
    }
    main(["preview", "train_sft", *as_argv(flags | ANSWERS)])
    shown = capsys.readouterr().out
    assert shown.count("row 1\n") == 2
    assert "row 2\n" not in shown
    assert "--eval_dataset" in shown


@pytest.mark.parametrize("command", ["train_sft", "train_ppo"])
def test_held_out_rows_are_also_shown(command, folder, tmp_path, capsys):
    data = "prompt_data" if command == "train_ppo" else "dataset"
    flags = {"pretrain": folder, data: write_rows(tmp_path / "rows.jsonl", answers(12)), "eval_size": 0.25, "rows": 1}
    main(["preview", command, *as_argv(flags | (ANSWERS if data == "dataset" else {}))])
    train, held_out = capsys.readouterr().out.split("--eval_size ")
    assert held_out.startswith(f"{flags[data]} (held out)\n")
    for part, rows in ((train, 9), (held_out, 3)):
        assert re.search(rf"rows used +{rows}\n", part)


def test_flags_can_come_from_a_file(folder, tmp_path, capsys):
    dataset = write_rows(tmp_path / "rows.jsonl", answers(12))
    (tmp_path / "run.yaml").write_text(f"pretrain: {folder}\ndataset: {dataset}\noutput_key: output\nrows: 0\n")
    main(["preview", "train_sft", "--config", "run.yaml"])
    assert "row 1\n" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["serve_rm"], "preview: expected a command that reads data, got serve_rm. Try: train_sft or"),
        (["sft"], "preview: expected a command that reads data, got sft. Try: openrlhf preview train_sft"),
        (["train_sft", "--dataset", "rows.jsonl"], "--pretrain is not given"),
        (["train_sft", "--rosw", "3"], "--rosw is not a flag of this command. Try: --rows"),
        (["train_sft", "--pretrain", "m", "--dataset", "d", "--rows", "-1"], "--rows is -1, but must be 0 or more"),
        (["train_prm", "--pretrain", "m", "--dataset", "d"], "--placeholder_token is not given"),
    ],
)
def test_mistakes_are_reported_in_one_line(argv, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["preview", *argv])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_help_lists_the_commands_and_the_flags_of_both(capsys):
    main(["preview", "--help"])
    usage = capsys.readouterr().out
    assert all(command in usage for command in PREVIEWED)
    with pytest.raises(SystemExit):
        main(["preview", "train_sft", "--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: openrlhf preview train_sft ")
    assert "--rows" in text
    assert "--input_key" in text
    main(["--help"])
    assert "  preview  " in capsys.readouterr().out


@pytest.mark.parametrize("command", PREVIEWED)
def test_a_preview_has_all_flags_of_the_command(command):
    own = flags_of(PREVIEWED[command])
    assert own.keys() < flags_of(with_section(PREVIEWED[command], PreviewFlags, "")).keys()
