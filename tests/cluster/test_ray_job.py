"""A whole run handed to a cluster with `ray job submit`, as docs/cluster.md says it: a token, a dashboard, a folder."""

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
HELD = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def environ(machine):
    """The token in a file, as the cluster and those who use it share it."""
    held = machine.folder / "token"
    held.write_text(TOKEN)
    held.chmod(0o600)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(held)}


@pytest.fixture
def address(machine, environ):
    """Where a head of this test alone takes jobs."""
    port = free_port()
    dashboard = ["--include-dashboard", "true", "--dashboard-host", "127.0.0.1", "--dashboard-port", port]
    start_head(machine, free_port(), dashboard, **environ)
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def command(tmp_path, models, machine):
    """Two steps; prompts and reward are named by their place in the folder that goes along, outputs by whole paths.

    Nothing says that it is a run on Ray: that it is within a job has to be enough.
    """
    (tmp_path / "work").mkdir()
    task_flags(tmp_path / "work", make_prompts(16))
    flags = {name: value for name, value in ON_RAY.items() if name != "runtime"}
    flags |= {"prompt_data": "./prompts.jsonl", "remote_rm_url": "./reward.py", "pretrain": models()}
    flags |= {"save_path": tmp_path / "out", "ckpt_path": tmp_path / "ckpt"}
    return [machine.python, "-m", "openrlhf.cli.train_ppo_ray", *as_argv(flags)]


def submit(machine, address, folder, command, **environ):
    """Ray gives its own agent ten seconds to be there, which on busy cores may take a second try."""
    words = ["-m", "ray.scripts.scripts", "job", "submit", "--address", address, "--working-dir", str(folder)]
    for _ in range(TRIES):
        with machine.open([*words, "--", *command], **environ) as submitting:
            out, said = submitting.communicate(timeout=WATCHDOG)
        if "No available agent" not in out + said:
            break
    return submitting.returncode, out + said


def books(address, page, headers):
    """What the head itself has noted."""
    with urlopen(Request(f"{address}/api/{page}", headers=headers), timeout=WATCHDOG) as answer:
        return json.load(answer)


def job_and_actors(address):
    """The one that was submitted, and the processes that its driver, and no other, asked the head for."""
    (job,) = [one for one in books(address, "jobs/", HELD) if one["type"] == "SUBMISSION"]
    actors = books(address, "v0/actors?detail=1", HELD)["data"]["result"]["result"]
    return job, [actor for actor in actors if actor["job_id"] == job["job_id"]]


def assert_trained(folder, before):
    """It loads in Transformers, and is no longer what it was."""
    (model, _), (first, _) = load(folder), load(before)
    pairs = zip(model.parameters(), first.parameters(), strict=True)
    assert not all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_job_trains_on_the_cluster_that_it_was_submitted_to(machine, environ, address, command, models, tmp_path):
    code, said = submit(machine, address, tmp_path / "work", command, **environ)
    assert code == 0, said
    ran = FinishedRun(tmp_path / "out", tmp_path / "ckpt")
    assert [(line["kind"], line["step"]) for line in ran.metrics] == [("train", 1), ("train", 2)]
    assert_trained(ran.save_path, models())

    job, actors = job_and_actors(address)
    assert job["status"] == "SUCCEEDED"
    assert job["driver_info"] is not None, said  # else it ran beside the cluster, not on it
    assert {actor["class_name"] for actor in actors} == {"ModelWorker", "EngineWorker"}
    assert wait_until_gone([int(job["driver_info"]["pid"]), *(actor["pid"] for actor in actors)])
    with pytest.raises(HTTPError, match="401"):  # and it was the token that let us in
        books(address, "jobs/", {})

    end(machine.processes())
    assert wait_until_gone(machine.processes())  # what was born meanwhile ends with its node
    assert machine.processes() == []
