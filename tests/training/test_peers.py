"""What the processes of a launch accept: where they listen, and how they treat bytes from their peers."""

import json
import socket
import subprocess

import pytest

from openrlhf.errors import BackendError
from openrlhf.training import processes
from tests.commands import DEADLINE, ROOT, command_environ, free_port
from tests.warm import warm_python


@pytest.mark.slow(seconds=5)
def test_processes_of_one_machine_listen_on_its_loopback_address_and_unpickle_nothing(tmp_path):
    """Without torchrun, which serves the store of its processes itself."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
    ranks = [
        subprocess.Popen(
            [*warm_python(), "-m", "tests.training.peer_worker", str(tmp_path)],
            cwd=ROOT,
            env=command_environ(**shared, RANK=str(rank), LOCAL_RANK=str(rank)),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=DEADLINE)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["listening"] == ["127.0.0.1"]
    assert set(second["listening"]) <= {"127.0.0.1"}
    assert not (tmp_path / "attacked-0").exists()
    assert first["error"] in ("UnicodeDecodeError", "JSONDecodeError")


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BackendError, match="--master_port"):
        processes.listen_on("127.0.0.1", taken.getsockname()[1])


def test_an_address_of_another_machine_means_all_addresses(capsys):
    with processes.listen_on("192.0.2.1", 0) as listening:  # reserved for documentation
        assert listening.getsockname()[0] == "0.0.0.0"
    assert "is not an address of this machine" in capsys.readouterr().err


def test_a_loopback_address_means_all_addresses_if_there_are_several_machines(monkeypatch):
    """Debian resolves the host's own name to a loopback address, but its peers do not."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with processes.listen_on("localhost", 0) as listening:
        assert listening.getsockname()[0] == "0.0.0.0"
