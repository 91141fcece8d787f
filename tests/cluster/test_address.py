"""Which Ray cluster a run joins, and which one gets its token."""

import os
import socket
import threading

import pytest

from openrlhf.cluster import address
from openrlhf.cluster.address import find_cluster
from openrlhf.errors import ConfigError

STRANGER = 54321  # a user id that is not ours


@pytest.fixture
def server():
    """A server that is no Ray, and what its clients said to it."""
    said = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    while data := connection.recv(4096):
                        said.extend(data)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", said
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def record(tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray").chmod(0o777)  # as Ray does
    return tmp_path / "ray" / "ray_current_cluster"


def give_away(path, monkeypatch):
    """Make the path belong to another user; only root can, so others become another user themselves."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(address.os, "geteuid", lambda: STRANGER)


@pytest.fixture
def environ(tmp_path):
    return {"RAY_TMPDIR": str(tmp_path), "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "PATH": os.environ["PATH"]}


@pytest.mark.parametrize("owned", ["file", "folder"])
def test_a_record_of_another_user_is_ignored(record, environ, server, monkeypatch, capsys, owned):
    record.write_text(server[0])
    give_away(record if owned == "file" else record.parent, monkeypatch)
    assert find_cluster(environ) is None
    assert f"belongs to user {STRANGER}" in capsys.readouterr().err or os.geteuid()
    with pytest.raises(ConfigError, match=r"cannot be trusted.*RAY_ADDRESS=host:port"):
        find_cluster(environ | {"RAY_ADDRESS": "auto"})
    assert not server[1]


def test_a_record_that_everyone_may_write_is_ignored(record, environ, server, capsys):
    record.write_text(server[0])
    record.chmod(0o666)
    assert find_cluster(environ) is None
    assert "everyone may write it" in capsys.readouterr().err
    assert not server[1]


@pytest.mark.parametrize("make", [os.symlink, lambda _, path: os.mkfifo(path)])
def test_a_record_that_is_not_a_plain_file_is_ignored(record, environ, tmp_path, server, make):
    (tmp_path / "elsewhere").write_text(server[0])
    make(tmp_path / "elsewhere", record)
    assert find_cluster(environ) is None
    assert not server[1]


def test_the_token_is_not_sent_to_a_cluster_that_was_not_named(record, environ, server):
    """Whatever answers at a recorded address may have taken it over from a Ray that died."""
    record.write_text(server[0])
    with pytest.raises(ConfigError, match=rf"only to a cluster that you name.*RAY_ADDRESS={server[0]}"):
        find_cluster(environ | {"RAY_AUTH_MODE": "token"})
    assert not server[1]
