"""Whole runs whose Ray loses its head, by SIGKILL amid a rollout: they end by themselves, and the next one goes on."""

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

REGICIDE = """
import os, signal
from pathlib import Path

def of_my_trainer(victim):
    '''The processes so named that the trainer, our parent, started.'''
    stats = [path.read_text().rpartition(")") for path in Path("/proc").glob("[0-9]*/stat")]
    return [head.split()[0] for head, _, rest in stats if int(rest.split()[1]) == os.getppid() and victim in head]

def is_ours(victim):
    '''False if it has ended, and its number may be another process's by now.'''
    environ = Path(f"/proc/{victim}/environ")
    return environ.exists() and f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}".encode() in environ.read_bytes()

def reward_func(queries, prompts, labels):
    here = Path(__file__).parent
    victims, metrics = here / "victims", here / "out" / "run" / "metrics.jsonl"
    if victims.exists() and metrics.exists() and metrics.read_text():  # amid the second rollout
        named = victims.read_text().split()
        victims.unlink()
        for victim in of_my_trainer("gcs_server") if named == ["private"] else filter(is_ours, named):
            os.kill(int(victim), signal.SIGKILL)
    return {"rewards": [float(len(query)) for query in queries]}
"""
GONE = "openrlhf: error: the head of Ray at "
GO_ON = " is gone, and the run with it. Try: the same command with --load_checkpoint, "


@pytest.fixture
def command(tmp_path, models):
    """A run of three steps with a checkpoint after each."""
    (tmp_path / "reward.py").write_text(REGICIDE)
    paths = {"pretrain": models(), "save_path": f"{tmp_path}/out", "ckpt_path": f"{tmp_path}/ckpt", "save_steps": 1}
    paths |= {
        "prompt_data": write_rows(tmp_path / "prompts.jsonl", make_prompts(24)),
        "remote_rm_url": tmp_path / "reward.py",
    }
    return ["-m", "openrlhf.cli.train_ppo_ray", *as_argv(ON_RAY | paths)]


def outcome(machine, command, **environ):
    with machine.open(command, **environ) as driver:
        _, said = driver.communicate(timeout=WATCHDOG)
    return driver.returncode, said


def assert_told(code, said):
    """In the last line; and it was ended by us, not by Ray when its minute was over."""
    last = said.splitlines()[-1]
    assert code == 1, said
    assert last.startswith(GONE), said
    assert GO_ON in last
    assert "Traceback" not in said
    assert "GCS" not in said


def steps(tmp_path):
    return [json.loads(line)["step"] for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow(seconds=40)
def test_a_lost_head_ends_a_run_that_had_joined_it_and_the_run_goes_on_with_the_next_head(machine, command, tmp_path):
    port = free_port()
    start_head(machine, port)
    (tmp_path / "victims").write_text(" ".join(map(str, machine.processes())))
    joined = {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    assert_told(*outcome(machine, command, **joined))
    assert wait_until_gone(machine.processes())
    assert steps(tmp_path) == [1]

    start_head(machine, port)
    code, said = outcome(machine, [*command, "--load_checkpoint"], **joined)
    assert code == 0, said
    assert "going on from" in said
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.slow(seconds=40)
def test_a_private_ray_that_loses_its_head_ends_with_the_run_and_the_next_one_starts(machine, command, tmp_path):
    (tmp_path / "victims").write_text("private")
    assert_told(*outcome(machine, command))
    assert wait_until_gone(machine.processes())
    assert machine.processes() == []
    assert steps(tmp_path) == [1]

    code, said = outcome(machine, [*command, "--load_checkpoint"])
    assert code == 0, said
    assert steps(tmp_path) == [1, 2, 3]
    assert machine.processes() == []


@pytest.mark.slow(seconds=40)
def test_processes_of_a_run_on_nodes_that_outlive_the_head_end_with_the_run(machine, command, tmp_path):
    """There Ray keeps them for a minute, until the nodes give up; these are still there when all is over."""
    with machine.start("head_and_node") as cluster:
        nodes = json.loads(cluster.stdout.readline())
        (tmp_path / "victims").write_text(" ".join(map(str, nodes["head"])))
        spread = ["--actor_num_nodes", "2", "--train_batch_size", "16"]
        with machine.open([*command, *spread], RAY_ADDRESS=nodes["address"]) as driver:
            wait_until(driver, lambda: workers_of(machine))
            _, said = driver.communicate(timeout=WATCHDOG)
        assert_told(driver.returncode, said)
        assert workers_of(machine) == []
        assert nodes["node"]
        assert set(nodes["node"]) <= set(machine.processes())
        cluster.kill()


def workers_of(machine):
    """Those of a run, by the names that Ray gives them and the folder in which its cluster was started."""
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


async def forever():
    await asyncio.Event().wait()


def test_a_head_that_hangs_up_is_called_again_and_is_lost_when_nobody_listens():
    with listening() as (server, port):

        def hang_up_twice():
            for _ in range(2):
                server.accept()[0].close()
            line, _ = server.accept()
            server.close()
            line.close()

        async def run():
            async with head.needed():
                threading.Thread(target=hang_up_twice).start()
                await forever()

        head = Head(f"127.0.0.1:{port}", {})
        with pytest.raises(BackendError, match=f"127.0.0.1:{port} is gone"):
            asyncio.run(asyncio.wait_for(run(), WATCHDOG))
        assert head.lost


def test_a_head_that_may_come_back_is_waited_for():
    with listening() as (server, port):
        back = threading.Event()

        def fall_and_rise():
            line, _ = server.accept()
            server.close()
            line.close()
            with listening(port) as (again, _):
                again.accept()
                back.set()

        async def run():
            async with head.needed():
                threading.Thread(target=fall_and_rise).start()
                assert await asyncio.to_thread(back.wait, WATCHDOG)

        head = Head(f"127.0.0.1:{port}", {MAY_COME_BACK: str(WATCHDOG)})
        asyncio.run(run())
        assert not head.lost


def test_what_fails_without_a_head_fails_for_that_and_nothing_else_does():
    async def fail(head):
        async with head.needed():
            raise ValueError("something")

    with listening() as (server, port):
        head = Head(f"127.0.0.1:{port}", {MAY_COME_BACK: str(WATCHDOG)})  # else the watch might be faster
        with pytest.raises(ValueError, match="something"):
            asyncio.run(fail(head))
        server.close()
        with pytest.raises(BackendError, match=r"the head of Ray at .* is gone.*--load_checkpoint"):
            asyncio.run(fail(head))
