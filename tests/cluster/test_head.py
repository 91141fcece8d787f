"""Runs whose Ray head is killed during a rollout end by themselves with an error, and can be resumed."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from openrlhf.cluster.head import MAY_COME_BACK, Head
from openrlhf.errors import BackendError
from tests.cluster.ray_machine import WATCHDOG, start_head, wait_until_gone
from tests.cluster.ray_runs import ON_RAY
from tests.commands import as_argv, free_port, wait_until
from tests.rl.toy_task import make_prompts
from tests.toy_data import write_rows
from tests.warm import warm_programs

KILLING_REWARD = """
import os, signal
from pathlib import Path
import psutil

def children_of_trainer(name):
    '''Return the pids with this name whose parent is the trainer, which started our supervisor too.'''
    wanted = {"name": name, "ppid": psutil.Process(os.getppid()).ppid()}
    return [process.pid for process in psutil.process_iter(["name", "ppid"]) if process.info == wanted]

def is_ours(pid):
    '''False if it has ended; another process may have its pid by now.'''
    try:
        return psutil.Process(int(pid)).environ().get("RAY_TMPDIR") == os.environ["RAY_TMPDIR"]
    except psutil.Error:
        return False

def reward_func(queries, prompts, labels):
    here = Path(__file__).parent
    targets, metrics = here / "targets", here / "out" / "run" / "metrics.jsonl"
    if targets.exists() and metrics.exists() and metrics.read_text():  # during the second rollout
        pids = targets.read_text().split()
        targets.unlink()
        for pid in children_of_trainer("gcs_server") if pids == ["private"] else filter(is_ours, pids):
            os.kill(int(pid), signal.SIGKILL)
        signal.pause()  # the trainer must notice by itself: Ray would end it at its next call
    return {"rewards": [float(len(query)) for query in queries]}
"""
GONE = "openrlhf: error: the Ray head node at "
TRY = " is gone, so the run cannot continue. Try: the same command with --load_checkpoint, "


@pytest.fixture
def command(tmp_path, models):
    """A command of three steps with a checkpoint after each; its reward kills the pids in `targets`."""
    (tmp_path / "reward.py").write_text(KILLING_REWARD)
    paths = {"pretrain": models(), "save_path": f"{tmp_path}/out", "ckpt_path": f"{tmp_path}/ckpt", "save_steps": 1}
    paths |= {
        "prompt_data": write_rows(tmp_path / "prompts.jsonl", make_prompts(24)),
        "remote_rm_url": tmp_path / "reward.py",
    }
    return ["-m", "openrlhf.cli.train_ppo_ray", *as_argv(ON_RAY | paths)]


def run_to_end(machine, command, **environ):
    with machine.start_python(command, **environ) as driver:
        _, stderr = driver.communicate(timeout=WATCHDOG)
    return driver.returncode, stderr


def assert_head_reported_lost(code, stderr):
    """Check the last line; Ray's own message, a minute later, would mention the GCS."""
    last = stderr.splitlines()[-1]
    assert code == 1, stderr
    assert last.startswith(GONE), stderr
    assert TRY in last
    assert "Traceback" not in stderr
    assert "GCS" not in stderr


def steps(tmp_path):
    return [json.loads(line)["step"] for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow(seconds=40)
def test_a_run_ends_when_the_head_is_lost_and_resumes_on_a_new_head(machine, command, tmp_path):
    port = free_port()
    start_head(machine, port)
    (tmp_path / "targets").write_text(" ".join(map(str, machine.settled_processes())))
    joined = {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    assert_head_reported_lost(*run_to_end(machine, command, **joined))
    assert wait_until_gone(machine.processes())
    assert steps(tmp_path) == [1]

    start_head(machine, port)
    code, stderr = run_to_end(machine, [*command, "--load_checkpoint"], **joined)
    assert code == 0, stderr
    assert "resuming from" in stderr
    assert f"joining the Ray cluster at 127.0.0.1:{port} without a token" in stderr
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.slow(seconds=40)
def test_a_private_ray_that_loses_its_head_ends_with_the_run_and_the_run_resumes(machine, command, tmp_path):
    (tmp_path / "targets").write_text("private")
    assert_head_reported_lost(*run_to_end(machine, command))
    assert wait_until_gone(machine.processes())
    assert machine.processes() == []
    assert steps(tmp_path) == [1]

    code, stderr = run_to_end(machine, [*command, "--load_checkpoint"])
    assert code == 0, stderr
    assert steps(tmp_path) == [1, 2, 3]
    assert machine.processes() == []


@pytest.mark.slow(seconds=40)
def test_workers_on_nodes_that_outlive_the_head_end_with_the_run(machine, command, tmp_path):
    """Ray would keep the workers for a minute, until the nodes give up. The nodes themselves outlive the run."""
    with machine.start_driver("head_and_node") as cluster:
        nodes = json.loads(cluster.stdout.readline())
        (tmp_path / "targets").write_text(" ".join(map(str, nodes["head"])))
        spread = ["--actor_num_nodes", "2", "--train_batch_size", "16"]
        with machine.start_python([*command, *spread], RAY_ADDRESS=nodes["address"]) as driver:
            wait_until(driver, lambda: workers_of(machine))
            _, stderr = driver.communicate(timeout=WATCHDOG)
        assert_head_reported_lost(driver.returncode, stderr)
        assert workers_of(machine) == []
        assert nodes["node"]
        assert set(nodes["node"]) <= set(machine.processes())
        cluster.kill()


def workers_of(machine):
    """Return the worker processes of a run, by the title that Ray gives them and the folder of their cluster."""
    found = []
    for program in warm_programs():
        with suppress(psutil.NoSuchProcess):  # it has ended
            title, folder = " ".join(program.cmdline()), Path(program.cwd())
            if title.startswith(("ray::ModelWorker", "ray::EngineWorker")) and folder.is_relative_to(machine.folder):
                found.append(program)
    return found


@contextmanager
def listening(port=0):
    with socket.create_server(("127.0.0.1", port)) as server:
        yield server, server.getsockname()[1]


async def wait_forever():
    await asyncio.Event().wait()


def test_a_head_that_closes_connections_is_lost_only_when_it_stops_listening():
    with listening() as (server, port):

        def close_twice():
            for _ in range(2):
                server.accept()[0].close()
            line, _ = server.accept()
            server.close()
            line.close()

        async def run():
            async with head.needed():
                threading.Thread(target=close_twice).start()
                await wait_forever()

        head = Head(f"127.0.0.1:{port}", {})
        with pytest.raises(BackendError, match=f"127.0.0.1:{port} is gone"):
            asyncio.run(asyncio.wait_for(run(), WATCHDOG))
        assert head.lost


def test_a_head_that_may_come_back_is_waited_for():
    with listening() as (server, port):
        back = threading.Event()

        def restart():
            line, _ = server.accept()
            server.close()
            line.close()
            with listening(port) as (again, _):
                again.accept()
                back.set()

        async def run():
            async with head.needed():
                threading.Thread(target=restart).start()
                assert await asyncio.to_thread(back.wait, WATCHDOG)

        head = Head(f"127.0.0.1:{port}", {MAY_COME_BACK: str(WATCHDOG)})
        asyncio.run(run())
        assert not head.lost


def test_an_error_is_blamed_on_the_head_only_if_the_head_is_gone():
    async def fail(head):
        async with head.needed():
            raise ValueError("something")

    with listening() as (server, port):
        head = Head(f"127.0.0.1:{port}", {MAY_COME_BACK: str(WATCHDOG)})  # otherwise the watcher might be faster
        with pytest.raises(ValueError, match="something"):
            asyncio.run(fail(head))
        server.close()
        with pytest.raises(BackendError, match=r"the Ray head node at .* is gone.*--load_checkpoint"):
            asyncio.run(fail(head))
