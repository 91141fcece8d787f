"""The notebooks in examples, executed at tiny scale by a real kernel."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.tiny import make_model

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))
WATCHDOG = 600  # seconds for one cell
GSM8K = [{"question": f"{number} + 1?", "answer": f"It is {number + 1}.\n#### {number + 1}"} for number in range(4)]


def read(name):
    return nbformat.read(EXAMPLES / name, as_version=4)


def is_parameters(cell):
    return "parameters" in cell.metadata.get("tags", [])


def execute(name, folder, monkeypatch, **parameters):
    """Run a notebook with other parameters; return the text that its cells printed or showed."""
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(variable, str(folder / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = read(name)
    place = next(number for number, cell in enumerate(notebook.cells) if is_parameters(cell))
    given = {"FOLDER": str(folder / "run"), **parameters}
    lines = [f"{parameter} = {value!r}" for parameter, value in given.items()]
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    NotebookClient(notebook, timeout=WATCHDOG, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_are_clean_and_have_one_cell_of_parameters(name):
    notebook = read(name)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert is_parameters(cells[0])
    assert sum(map(is_parameters, cells)) == 1
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.slow(seconds=16)
def test_first_run(tmp_path, monkeypatch):
    shown = execute("first_run.ipynb", tmp_path, monkeypatch, SFT_ROWS=128, STEPS=2)
    assert "[1.3, 0.15]" in shown  # the reward of a right and of a half-right answer
    assert "held-out numbers sorted correctly: " in shown
    assert "openrlhf: saved " in shown


@pytest.mark.nightly
@pytest.mark.slow(seconds=120)
def test_first_run_learns_to_sort(tmp_path, monkeypatch):
    shown = execute("first_run.ipynb", tmp_path, monkeypatch)
    (line,) = (line for line in shown.splitlines() if line.startswith("held-out numbers sorted correctly: "))
    before, after = (int(word.removesuffix("%")) for word in line.split() if word.endswith("%"))
    assert after > before + 20


@pytest.mark.nightly
@pytest.mark.slow(seconds=40)
def test_qlora_grpo_on_a_cpu(tmp_path, monkeypatch):
    rows = tmp_path / "tasks.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    small = {"PROMPTS": 2, "SAMPLES": 2, "RESPONSE": 8, "STEPS": 2, "VLLM": False}
    model = make_model(tmp_path / "model", hidden_size=64, max_position_embeddings=1024)
    shown = execute("qlora_grpo_16gb.ipynb", tmp_path, monkeypatch, MODEL=model, TASKS=str(rows), **small)
    assert "openrlhf: dry run: nothing was trained or written" in shown
    assert (tmp_path / "run" / "merged" / "config.json").exists()


@pytest.mark.nightly
@pytest.mark.slow(seconds=40)
def test_an_agent_of_the_notebook_trains(tmp_path, monkeypatch):
    shown = execute("your_own_agent.ipynb", tmp_path, monkeypatch, STEPS=2, GAMES=32)
    assert "'environment_feedback': '>', 'done': False" in shown
    assert len(list(Path(tmp_path, "run/policy/run/rollouts").glob("step_*.parquet"))) == 2
    assert os.path.exists(tmp_path / "run" / "policy" / "config.json")
