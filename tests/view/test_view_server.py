"""The served page: its answers, and the requests that it refuses."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from urllib.parse import urlencode, urlsplit

import pytest

from openrlhf.errors import ConfigError
from openrlhf.view.server import Server, bind
from openrlhf.view.viewer import MOST_SIDE_BY_SIDE, Viewer
from tests.commands import DEADLINE, command_environ
from tests.view.made_runs import make_run, record, write_metrics, write_step


@contextmanager
def serving(workspace, *folders):
    """Serve the page of some runs from a thread; yield its address."""
    workspace.mkdir(exist_ok=True)
    viewer = Viewer([str(folder) for folder in folders], workspace)
    viewer.update()
    server = Server(viewer)
    with bind(None) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(DEADLINE)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a run that has samples, and one without."""
    folder = tmp_path_factory.mktemp("made")
    make_run(folder / "grpo")
    write_metrics(folder / "sft" / "run", [("train", 1, {"gpt_loss": float("nan")})])
    return folder


@pytest.fixture(scope="module")
def address(made, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("index"), made) as address:
        yield address


def get(address, path, **parameters):
    with urllib.request.urlopen(f"{address}{path}?{urlencode(parameters)}", timeout=DEADLINE) as response:
        return json.loads(response.read())


def status(address, method="GET", path="/", headers=None):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=DEADLINE)
    connection.request(method, path, headers=headers or {})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status, response.headers


def test_runs_metrics_and_flags(address):
    grpo, sft = sorted(get(address, "/api/runs"), key=lambda run: run["name"])
    assert (grpo["name"], grpo["samples"], sft["name"], sft["samples"]) == ("grpo", 36, "sft", 0)
    part = get(address, "/api/metrics", run=grpo["id"])
    assert part["curves"]["train/reward"]["steps"] == list(range(1, 31))
    assert get(address, "/api/metrics", run=grpo["id"], **part["position"])["curves"] == {}
    assert get(address, "/api/metrics", run=sft["id"])["curves"]["train/gpt_loss"]["values"] == [None]
    assert get(address, "/api/flags", run=grpo["id"]) == {"pretrain": "org/model", "max_ckpt_mem": "Infinity"}


def test_samples_and_groups(address):
    (run,) = (run["id"] for run in get(address, "/api/runs") if run["name"] == "grpo")
    found = get(address, "/api/samples", run=run, step_to=2, text="word1", order="best")
    assert (found["total"], found["indexed"]) == (8, 36)
    group = get(address, "/api/group", sample=found["rows"][0]["id"])
    assert [sample["response"] for sample in group["samples"]] == [f"word1 a{number}" for number in range(4)]
    sample = group["samples"][0]
    assert "".join(sample["texts"]) == sample["response"]
    assert sample["actions"] == [True] * sample["length"]
    assert get(address, "/api/group", sample=10**6) == {"samples": [], "total": 0}
    fractions = {"step_from": 1.5, "step_to": "3e0", "length_from": 0.5, "length_to": "1e3"}
    assert get(address, "/api/samples", run=run, **fractions)["total"] == 24


def test_a_large_group_is_shown_around_the_chosen_sample(tmp_path):
    run_dir = make_run(tmp_path / "a", recorded=0)
    write_step(run_dir, 1, [record(1, 0, f"n{number}") for number in range(100)])
    viewer = Viewer([str(run_dir)], tmp_path)
    viewer.update()
    for chosen in (0, 50, 99):
        group = viewer.group(chosen + 1)
        assert (len(group.samples), group.total) == (MOST_SIDE_BY_SIDE, 100)
        assert f"n{chosen}" in [shown.sample.response for shown in group.samples]


def test_new_runs_and_a_later_tokenizer_are_found(tmp_path):
    first = make_run(tmp_path / "runs" / "first", recorded=1)
    tokenizer = tmp_path / "runs" / "first" / "tokenizer.json"
    tokenizer.rename(tmp_path / "later.json")
    viewer = Viewer([str(tmp_path / "runs")], tmp_path)
    viewer.update()
    assert viewer.group(1).samples[0].texts is None
    (tmp_path / "later.json").rename(tokenizer)  # a run saves its tokenizer when it ends
    assert viewer.group(1).samples[0].texts is not None
    make_run(tmp_path / "runs" / "a_second", recorded=1)
    viewer.find_new_runs()
    viewer.update()
    assert [(run.id, run.folder) for run in viewer.runs()] == [
        (0, str(first)),
        (1, str(tmp_path / "runs/a_second/run")),
    ]
    (tmp_path / "runs").rename(tmp_path / "moved")
    viewer.find_new_runs()
    viewer.update()
    assert [run.samples for run in viewer.runs()] == [0, 0]


def test_an_unreadable_file_is_reported_once_and_the_others_are_indexed(tmp_path, capsys):
    first = make_run(tmp_path / "runs" / "first", recorded=2)
    make_run(tmp_path / "runs" / "second", recorded=1)
    (first / "rollouts" / "step_000001.jsonl").unlink()
    (first / "rollouts" / "step_000001.jsonl").mkdir()  # even root cannot read a folder
    viewer = Viewer([str(tmp_path / "runs")], tmp_path)
    viewer.update()
    viewer.update()
    assert [(run.name, run.samples) for run in viewer.runs()] == [("first", 12), ("second", 12)]
    assert capsys.readouterr().err.count("first: some samples are not shown: [Errno") == 1
    (first / "rollouts" / "step_000002.jsonl").rename(tmp_path / "aside")
    (first / "rollouts" / "step_000002.jsonl").mkdir()
    assert viewer.group(1).samples == []


# What is refused


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1.example.org", "0.0.0.0", "[::1]", ""])
def test_other_names_are_refused(address, host):
    assert status(address, headers={"Host": host})[0] == 400
    assert status(address, path="/api/runs", headers={"Host": f"{host}:80"})[0] == 400


def test_names_of_this_machine_are_served(address):
    port = urlsplit(address).port
    assert [status(address, headers={"Host": f"{name}:{port}"})[0] for name in ("127.0.0.1", "localhost")] == [200, 200]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_get_is_served(address, method):
    assert status(address, method, "/api/runs")[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static//etc/passwd",
        "/static/index.html",
        "/static/",
        "/api/",
        "/docs",
        "/openapi.json",
        "/api/metrics?run=99",
        "/api/metrics?run=-1",
        "/api/flags?run=99",
        f"/api/group?sample={10**30}",
        f"/api/samples?run={10**30}",
    ],
)
def test_missing_items_are_not_found(address, path):
    assert status(address, path=path)[0] == 404


@pytest.mark.parametrize("path", ["/api/metrics", "/api/samples?run=x", "/api/samples?run=0&order=id;DROP"])
def test_wrong_parameters_are_refused(address, path):
    assert status(address, path=path)[0] == 422


def test_every_answer_has_the_policy_and_none_allows_other_origins(address):
    for path in ("/", "/api/runs", "/static/app.js", "/nowhere"):
        _, headers = status(address, path=path, headers={"Origin": "http://example.org"})
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in headers


def test_a_taken_port_is_an_error():
    with bind(None) as taken, pytest.raises(ConfigError, match=r"is taken on 127.0.0.1. Try: no --port"):
        bind(taken.getsockname()[1])


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_its_address_and_ends_with_a_signal(tmp_path, stop):
    make_run(tmp_path / "grpo")
    words = [sys.executable, "-m", "openrlhf.cli.main", "view", "grpo"]
    environ = command_environ(TMPDIR=str(tmp_path))
    process = subprocess.Popen(words, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)
    line = process.stderr.readline()
    address = line.split()[4]
    assert line == f"openrlhf: 1 run on {address} (Ctrl-C ends the server)\n"
    assert len(get(address, "/api/runs")) == 1
    assert list(tmp_path.glob("openrlhf-view-*"))
    process.send_signal(stop)
    assert (process.wait(DEADLINE), process.stderr.read()) == (0, "")
    process.stderr.close()
    assert list(tmp_path.glob("openrlhf-view-*")) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(address).port), timeout=DEADLINE)


def test_the_page_starts_without_torch(tmp_path):
    make_run(tmp_path / "grpo")
    program = (
        "import sys; from openrlhf.view import server, report; from openrlhf.view.viewer import Viewer;"
        "from pathlib import Path; viewer = Viewer(sys.argv[1:], Path()); viewer.update(); viewer.group(1);"
        "print(sorted({'torch', 'transformers', 'datasets'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "grpo"], cwd=tmp_path, env=command_environ(), capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
