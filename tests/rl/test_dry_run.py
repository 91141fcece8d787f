"""Before a model loads, template, data and reward are tried on the first rows; --dry_run stops there."""

import contextlib
import http.server
import json
import shutil
import socket
import threading
from pathlib import Path

import pytest

from tests.agents.sessions import children
from tests.commands import FAST, run_command
from tests.rl.toy_task import SMALL, make_prompts, task_flags
from tests.toy_data import ANSWERS, PAIRS, STEPS, answers, pairs, steps, verdicts, write_rows

AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Instance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        %s

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Instance)
"""
ONGOING = """return {"rewards": 0.5, "scores": 0.5, "environment_feedback": " on", "done": False}"""


@pytest.fixture
def model_without_weights(models, tmp_path):
    """A model folder without weights, so that loading the model fails."""
    folder = tmp_path / "hollow"
    shutil.copytree(models(), folder)
    (folder / "model.safetensors").unlink()
    return str(folder)


@pytest.fixture
def run_ppo(tmp_path, model_without_weights, capsys):
    """Return a function that runs train_ppo on a model that cannot load; it returns the exit code and stderr."""

    def start(reward=None, rows=None, **flags):
        before = children()
        paths = {"save_path": "./out", "ckpt_path": "./ckpt", "pretrain": model_without_weights}
        given = task_flags(tmp_path, rows or make_prompts(12), reward) if reward else {}
        code = 0
        try:
            run_command("train_ppo", paths | SMALL | given | flags)
        except SystemExit as end:
            code = end.code
        assert children() == before
        return code, capsys.readouterr().err

    return start


def reward_source(line):
    return f"def reward_func(queries, prompts, labels):\n    {line}\n"


VALID = reward_source('return {"rewards": [len(query) for query in queries]}')


def test_a_dry_run_shows_a_prompt_and_its_reward(run_ppo, tmp_path):
    code, stderr = run_ppo(VALID, dry_run=True, input_template="<{}>")
    assert code == 0
    assert "the first prompt, 4 tokens: '<aa>'" in stderr
    assert "rewards of made-up answers to the first 8 prompts are 9 to 15; 'x</s>' gets 9" in stderr
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"hollow", "prompts.jsonl", "reward.py"}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("return [float('nan') for _ in queries]", "the reward is nan: expected a finite number"),
        ("return [1.0]", "rewards has 1 value for 4 samples"),
        ("return None", "got None"),
        ("raise KeyError('answer')", "raised KeyError: 'answer' at"),
        ("return [1.0 if 'g' not in p else 'x' for p in prompts]", "prompt 6 'gacc'"),
    ],
)
def test_an_invalid_reward_is_found_before_a_model_loads(run_ppo, line, complaint):
    code, stderr = run_ppo(reward_source(line))
    assert code == 1
    assert "in the test with made-up answers before training: " in stderr
    assert complaint in stderr
    assert "reward.py" in stderr


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"aux_loss_coef": 0.1}, "--aux_loss_coef 0.1 needs a model with a router loss"),
        ({"router_replay": True}, "has no experts"),
        (
            {"runtime": "ray", "actor_num_gpus_per_node": 3, "ds_tensor_parallel_size": 3},
            "--ds_tensor_parallel_size 3 does not divide the 4 attention heads",
        ),
        (
            {"runtime": "ray", "backend": "fsdp", "actor_num_gpus_per_node": 4, "ds_tensor_parallel_size": 4},
            "--ds_tensor_parallel_size 4 does not divide the 2 key heads",
        ),
    ],
)
@pytest.mark.parametrize("dry", [False, True])
def test_a_model_that_does_not_fit_the_flags_is_rejected_by_its_config(run_ppo, flags, complaint, dry):
    code, stderr = run_ppo(VALID, **flags | ({"dry_run": True} if dry else {}))
    assert code == 2
    assert complaint in stderr
    assert "the first prompt" not in stderr


def test_with_a_valid_reward_the_model_loads(run_ppo):
    code, stderr = run_ppo(VALID)
    assert code == 2
    assert "'x</s>' gets 7" in stderr
    assert "cannot load the model" in stderr


def test_skipped_failures_are_counted(run_ppo):
    line = "return [None if 'b' in prompt else 1.0 for prompt in prompts]"
    code, stderr = run_ppo(reward_source(line), dry_run=True, on_reward_error="skip")
    assert code == 0
    assert "4 made-up answers to the first 8 prompts failed" in stderr
    assert "'x</s>' gets 1" in stderr


def test_a_reward_that_compares_samples_gets_a_whole_group(run_ppo):
    line = "spread = max(map(len, queries)) - min(map(len, queries)); return [len(query) / spread for query in queries]"
    assert run_ppo(reward_source(line), dry_run=True)[0] == 0


SAME = "right answers (the labels) and wrong answers to these prompts get the same rewards"


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("return [1.0 if label in query[len(prompt):] else 0.0 for query, prompt, label in data]", False),
        ("return [1.0 if 'boxed' in query else 0.0 for query, prompt, label in data]", True),
        ("return [float(len(prompt)) for query, prompt, label in data]", True),  # not the same for each prompt
    ],
)
def test_a_reward_that_does_not_tell_right_from_wrong_is_reported(run_ppo, samples, line, same):
    flags = {"n_samples_per_prompt": samples, "advantage_estimator": "reinforce", "dry_run": True}
    source = reward_source(f"data = zip(queries, prompts, labels); assert len(queries) == {samples}; {line}")
    code, stderr = run_ppo(source, rows=make_prompts(5, label="x"), **flags)
    assert code == 0, stderr
    assert "rewards of made-up answers to the first 5 prompts are" in stderr
    assert (SAME in stderr) == same


def test_labels_that_are_not_text_reach_the_reward(run_ppo):
    rows = [row | {"label": {"answer": [1, 2]}} for row in make_prompts(3)]
    code, stderr = run_ppo(reward_source("return [float(label['answer'][1]) for label in labels]"), rows, dry_run=True)
    assert code == 0
    assert "to the first 3 prompts are 2; 'a made-u' gets 2" in stderr  # --generate_max_len is 8


def test_a_reward_model_is_not_called(run_ppo, models, tmp_path):
    prompts = write_rows(tmp_path / "prompts.jsonl", make_prompts(4))
    code, stderr = run_ppo(prompt_data=prompts, reward_pretrain=models(), dry_run=True)
    assert code == 0
    assert "the first prompt" in stderr
    assert "rewards of made-up" not in stderr


def test_a_reward_server_is_called(run_ppo, tmp_path):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps({"rewards": [0.25] * (len(body["query"]) - wrong)}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    prompts = write_rows(tmp_path / "prompts.jsonl", make_prompts(4))
    flags = {"prompt_data": prompts, "remote_rm_url": f"http://127.0.0.1:{server.server_port}", "dry_run": True}
    try:
        wrong = 0
        assert "'x</s>' gets 0.25" in run_ppo(**flags)[1]
        wrong = 1
        code, stderr = run_ppo(**flags)
    finally:
        server.shutdown()
        server.server_close()
    assert code == 1
    assert "rewards has 3 values for 4 samples" in stderr


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(
    ("step", "code", "expected"),
    [
        (ONGOING, 0, "gets 1.5"),  # three answers fill the context
        (ONGOING.replace("False", "True"), 0, "gets 0.5"),
        (f"if 'a made' in states['action_text']: return oh\n        {ONGOING}", 1, "raised NameError: name 'oh'"),
        (ONGOING.replace("0.5", "float('nan')"), 1, "'rewards' of the agent's step is nan"),
        ("return {'rewards': 1.0}", 1, "returned a dict without done"),
        ("return states['nothing']", 1, "raised KeyError: 'nothing'"),
    ],
)
def test_an_agent_plays_an_episode_without_an_engine(run_ppo, tmp_path, step, code, expected):
    (tmp_path / "agent.py").write_text(AGENT % step)
    prompts = write_rows(tmp_path / "prompts.jsonl", make_prompts(4))
    found, stderr = run_ppo(prompt_data=prompts, agent_func_path="./agent.py", dry_run=True)
    assert found == code, stderr
    assert expected in stderr


def test_the_error_for_a_missing_agent_method_shows_its_signature(run_ppo, tmp_path):
    source = "from openrlhf.utils.agent import OpenAIAgentExecutor\nclass AgentExecutor(OpenAIAgentExecutor): ..."
    (tmp_path / "agent.py").write_text(source)
    prompts = write_rows(tmp_path / "prompts.jsonl", make_prompts(4))
    code, stderr = run_ppo(prompt_data=prompts, agent_func_path="./agent.py")
    assert code == 2
    assert "agent.py has no method run_agent" in stderr
    assert "def run_agent(self, base_url, api_key, prompt, label): ..." in stderr


HANGING = """
import time

def reward_func(queries, prompts, labels):
    with open("calls.txt", "a") as file:
        file.write(f"{{prompts[0]}} {{len(queries)}}\\n")
    if {condition}:
        time.sleep(3600)
    return [1.0 for query in queries]
"""


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_reward_that_hangs_costs_one_timeout(run_ppo, tmp_path, policy):
    """Each prompt is tried at most once, and none of its samples alone."""
    source = HANGING.format(condition="True")
    code, stderr = run_ppo(source, dry_run=True, reward_timeout=2, on_reward_error=policy)
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert set(calls) <= {f"{row['input']} 4" for row in make_prompts(8)}
    assert len(calls) == len(set(calls))
    assert "reward.py did not return within 2 s (--reward_timeout), for prompt 0 'aa'" in stderr
    assert code == (1 if policy == "stop" else 0), stderr


@pytest.mark.slow(seconds=5)
def test_the_trial_names_the_prompt_that_hangs(run_ppo, monkeypatch):
    monkeypatch.setattr("openrlhf.rl.dry_run.HANGING", 0.0)  # on a slow machine the others may take most of the time
    code, stderr = run_ppo(HANGING.format(condition="prompts[0] == 'gacc'"), dry_run=True, reward_timeout=5)
    assert code == 1
    assert "did not return within 5 s (--reward_timeout), for prompt 6 'gacc'" in stderr


@pytest.mark.slow(seconds=5)
def test_a_slow_agent_ends_the_trial_but_not_the_run(run_ppo, tmp_path):
    """Each of its three steps takes less than the timeout."""
    (tmp_path / "agent.py").write_text(AGENT % ("import asyncio; await asyncio.sleep(1.9); " + ONGOING))
    prompts = write_rows(tmp_path / "prompts.jsonl", make_prompts(4))
    code, stderr = run_ppo(prompt_data=prompts, agent_func_path="./agent.py", dry_run=True, reward_timeout=4)
    assert code == 0, stderr
    assert "the reward test ended after 4 s (--reward_timeout) with 0 of 4 prompts" in stderr


@pytest.mark.slow(seconds=2)
def test_a_server_that_never_answers_costs_one_timeout(run_ppo, tmp_path):
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    connections.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        prompts = write_rows(tmp_path / "prompts.jsonl", make_prompts(4))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        code, stderr = run_ppo(prompt_data=prompts, remote_rm_url=url, dry_run=True, reward_timeout=2)
    assert code == 1
    assert "a reward server (--remote_rm_url) did not return within 2 s (--reward_timeout), for prompt 0 'aa'" in stderr
    assert len(connections) <= 4  # one for each prompt: no retries
    for connection in connections:
        connection.close()


SUPERVISED = {
    "train_sft": (answers(12), ANSWERS, "the first row, 8 tokens: 'daced=[[D</s>]]'"),
    "train_dpo": (pairs(12), PAIRS, "; rejected 13 tokens: 'ynbiq=[[qvprpz</s>]]'"),
    "train_rm": (pairs(12), PAIRS, "the first row, chosen 12 tokens: 'ynbiq=[["),
    "train_kto": (verdicts(12), ANSWERS, "</s>]]'; desirable"),
    "train_prm": (steps(12), STEPS, "[[#: "),
}


@pytest.mark.parametrize("command", SUPERVISED)
def test_a_dry_run_shows_the_learned_text(command, model_without_weights, tmp_path, capsys):
    rows, flags, expected = SUPERVISED[command]
    dataset = write_rows(tmp_path / "rows.jsonl", rows)
    run_command(command, {"pretrain": model_without_weights, "dataset": dataset, "dry_run": True, **flags})
    stderr = capsys.readouterr().err
    assert expected in stderr
    assert "dry run: nothing was trained or written" in stderr
    assert {path.name for path in tmp_path.iterdir()} == {"hollow", "rows.jsonl"}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"lr_scheduler": "sideways"}, "--lr_scheduler sideways"),
        ({"output_key": "nowhere"}, "row 1: no field 'nowhere'; the row has 'input', 'output'. Try: --output_key"),
        (
            {"eval_dataset": "./bad.jsonl"},
            "bad.jsonl, row 1: no field 'input'; the row has 'text'. Try: --input_key text",
        ),
    ],
)
def test_a_dry_run_reports_the_errors_of_a_run(model_without_weights, tmp_path, capsys, flags, complaint):
    write_rows(tmp_path / "bad.jsonl", [{"text": "x"}])
    dataset = write_rows(tmp_path / "rows.jsonl", answers(12))
    with pytest.raises(SystemExit) as ended:
        run_command(
            "train_sft",
            FAST | {"pretrain": model_without_weights, "dataset": dataset, "dry_run": True, **ANSWERS, **flags},
        )
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_dry_run_looks_for_the_device(model_without_weights, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    dataset = write_rows(tmp_path / "rows.jsonl", answers(12))
    flags = {"pretrain": model_without_weights, "dataset": dataset, "dry_run": True, "device": "cuda", **ANSWERS}
    with pytest.raises(SystemExit) as ended:
        run_command("train_sft", flags)
    assert ended.value.code == 2
    assert "--device cuda needs a GPU, but PyTorch finds none. Try: --device cpu" in capsys.readouterr().err


def test_an_unknown_schedule_is_rejected_in_rl(run_ppo):
    code, stderr = run_ppo(VALID, lr_scheduler="sideways")
    assert (code, "--lr_scheduler sideways" in stderr) == (2, True)


def test_a_dry_run_does_not_download(tmp_path, capsys):
    dataset = write_rows(tmp_path / "rows.jsonl", answers(12))
    run_command("train_sft", {"pretrain": "org/model", "dataset": f"{dataset},org/data", "dry_run": True})
    assert "no rows were tested: org/model, org/data must be downloaded first" in capsys.readouterr().err
    assert Path(dataset).exists()
