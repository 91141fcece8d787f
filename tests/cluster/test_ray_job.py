"""A whole run submitted with `ray job submit`, as in docs/cluster.md: a token, a dashboard, a working directory."""

import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

from tests.cluster.ray_machine import WATCHDOG, end, start_head, wait_until_gone
from tests.cluster.ray_runs import ON_RAY
from tests.commands import FinishedRun, as_argv, free_port
from tests.plain_transformers import load
from tests.rl.toy_task import make_prompts, task_flags

pytestmark = pytest.mark.slow(seconds=40)
TOKEN = "0123456789abcdef" * 4
TRIES = 5
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def environ(machine):
    """Variables that name the file with the token, which the cluster and its users share."""
    token_file = machine.folder / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}


@pytest.fixture
def address(machine, environ):
    """The address at which a head of this test accepts jobs."""
    port = free_port()
    dashboard = ["--include-dashboard", "true", "--dashboard-host", "127.0.0.1", "--dashboard-port", port]
    start_head(machine, free_port(), dashboard, **environ)
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def command(tmp_path, models, machine):
    """Two steps; prompts and reward are relative to the working directory of the job, outputs are absolute.

    No flag asks for Ray: running inside a job must be enough.
    """
    (tmp_path / "work").mkdir()
    task_flags(tmp_path / "work", make_prompts(16))
    flags = {name: value for name, value in ON_RAY.items() if name != "runtime"}
    flags |= {"prompt_data": "./prompts.jsonl", "remote_rm_url": "./reward.py", "pretrain": models()}
    flags |= {"save_path": tmp_path / "out", "ckpt_path": tmp_path / "ckpt"}
    return [machine.python, "-m", "openrlhf.cli.train_ppo_ray", *as_argv(flags)]


def submit(machine, address, folder, command, **environ):
    """Submit the job. Ray waits only ten seconds for its agent to start, so a busy machine may need several tries."""
    words = ["-m", "ray.scripts.scripts", "job", "submit", "--address", address, "--working-dir", str(folder)]
    for _ in range(TRIES):
        with machine.start_python([*words, "--", *command], **environ) as process:
            out, stderr = process.communicate(timeout=WATCHDOG)
        if "No available agent" not in out + stderr:
            break
    return process.returncode, out + stderr


def query(address, page, headers):
    """Query the head's own API."""
    with urlopen(Request(f"{address}/api/{page}", headers=headers), timeout=WATCHDOG) as answer:
        return json.load(answer)


def job_and_actors(address):
    """Return the submitted job and the actors that belong to it."""
    (job,) = [one for one in query(address, "jobs/", HEADERS) if one["type"] == "SUBMISSION"]
    actors = query(address, "v0/actors?detail=1", HEADERS)["data"]["result"]["result"]
    return job, [actor for actor in actors if actor["job_id"] == job["job_id"]]


def assert_trained(folder, before):
    """Check that the model loads in Transformers and differs from the one before training."""
    (model, _), (first, _) = load(folder), load(before)
    pairs = zip(model.parameters(), first.parameters(), strict=True)
    assert not all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_submitted_job_trains_on_its_cluster(machine, environ, address, command, models, tmp_path):
    code, stderr = submit(machine, address, tmp_path / "work", command, **environ)
    assert code == 0, stderr
    ran = FinishedRun(tmp_path / "out", tmp_path / "ckpt")
    assert [(line["kind"], line["step"]) for line in ran.metrics] == [("train", 1), ("train", 2)]
    assert_trained(ran.save_path, models())

    job, actors = job_and_actors(address)
    assert job["status"] == "SUCCEEDED"
    assert job["driver_info"] is not None, stderr  # otherwise it did not run on the cluster
    assert {actor["class_name"] for actor in actors} == {"ModelWorker", "EngineWorker"}
    assert wait_until_gone([int(job["driver_info"]["pid"]), *(actor["pid"] for actor in actors)])
    with pytest.raises(HTTPError, match="401"):  # the token was really required
        query(address, "jobs/", {})

    end(machine.processes())
    assert wait_until_gone(machine.processes())  # processes started since then end with their node
    assert machine.processes() == []
