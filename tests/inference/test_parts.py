"""Rows of several processes are joined into one file, however often the run was stopped."""

import json
from pathlib import Path

import pytest

from openrlhf.config.commands import BatchInferenceConfig
from openrlhf.config.sections.model import ServedModelFlags
from openrlhf.errors import BackendError, ConfigError, DataError
from openrlhf.inference.parts import OutputParts
from openrlhf.training.folder_lock import hold_folder

OUTPUT = Path("out.jsonl")
ROWS = [{"output": f"answer {number} “quoted”\n\u2028"} for number in range(10)]


@pytest.fixture
def process(monkeypatch):
    """Return a function that opens the parts as the process of a rank does."""

    def start(rank=0, world=1, group=1, output=OUTPUT, model=None):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        config = BatchInferenceConfig(model=ServedModelFlags(pretrain=model))
        parts = OutputParts(output, config, total=len(ROWS), group=group)
        parts.lock.close()  # as when the process ends
        return parts

    return start


def write(parts, count=None):
    with parts.file:
        for number in parts.missing[:count]:
            parts.write(number, ROWS[number])


def test_groups_stay_together_and_every_row_has_one_process(process):
    shares = [process(rank, 2, group=3).share for rank in (0, 1)]
    assert shares == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9]]


def test_a_run_resumes_with_another_number_of_processes(process):
    for rank in range(3):
        write(process(rank, 3), count=2)
    with Path("out.jsonl.parts/rank2.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"number": 8, "ro')  # the process was killed here, and its rank does not exist in the next run
    later = process(0, 1)
    assert later.missing == [6, 7, 8, 9]
    write(later)
    assert later.finish(later.rows()) == len(ROWS)
    assert [json.loads(line) for line in OUTPUT.read_text(encoding="utf-8").split("\n")[:-1]] == ROWS
    assert not Path("out.jsonl.parts").exists()


def test_missing_rows_are_an_error(process):
    write(process(0, 2))
    with pytest.raises(BackendError, match="lacks 5 of 10 rows"):
        next(process(0, 2).rows())


def test_a_damaged_file_is_named(process):
    write(process())
    Path("out.jsonl.parts/rank0.jsonl").write_bytes(b"\0\0\0\n")
    with pytest.raises(DataError, match=r"rank0\.jsonl is damaged. Try: rm -r out.jsonl.parts"):
        process()


def test_rows_may_be_written_into_the_models_folder(process):
    model = Path("model")
    model.mkdir()
    (model / "config.json").write_text("{}")
    output = model / "out.jsonl"
    output.write_text("of an earlier run")
    write(process(output=output, model="./model"), count=2)
    (model / ".out.jsonl.writing").write_text("a run that was killed at its end")
    assert len(process(output=output, model="./model").missing) == len(ROWS) - 2
    (model / "config.json").write_text('{"other": "weights"}')
    with pytest.raises(ConfigError, match="the content of --pretrain"):
        process(output=output, model="./model")


def test_a_run_without_rows_may_be_replaced_by_a_different_run(process):
    process(model="wrong").file.close()
    write(process(model="right"), count=1)
    with pytest.raises(ConfigError, match="--pretrain right -> wrong"):
        process(model="wrong")


def test_a_run_killed_during_cleanup_leaves_no_rows_without_a_plan(process, monkeypatch):
    write(parts := process(model="one"))

    def killed(folder, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        parts.finish(parts.rows())
    (parts.folder / "plan.json").unlink()
    assert len(process(model="other").missing) == len(ROWS)


def test_two_runs_cannot_write_the_same_output(process):
    first = process()
    with (
        hold_folder(first.folder, "--output_path", ".rank0.lock"),
        pytest.raises(ConfigError, match=r"--output_path out\.jsonl\.parts is in use by another run: process \d+ on"),
    ):
        process()
    write(process())
