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
    """The address of a server that is not Ray, the data that its clients sent, and its socket."""
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
        yield f"127.0.0.1:{listener.getsockname()[1]}", said, listener
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def record(tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray").chmod(0o777)  # as Ray does
    return tmp_path / "ray" / "ray_current_cluster"


def give_away(path, monkeypatch):
    """Make the path belong to another user: change its owner as root, else the user id that this process sees."""
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


def test_auto_does_not_send_the_token_to_another_user(record, environ, server, monkeypatch, capsys):
    """A record outlives its Ray, and its port is then free for everyone."""
    record.write_text(server[0])
    if os.geteuid() == 0:
        os.chown(server[2].fileno(), STRANGER, STRANGER)  # the owner that the kernel lists for a socket
    else:
        monkeypatch.setattr(address, "find_listeners", lambda _: {STRANGER})
    environ["RAY_AUTH_MODE"] = "token"
    with pytest.raises(ConfigError, match=rf"user {STRANGER} listens at {server[0]}.*RAY_ADDRESS=host:port"):
        find_cluster(environ | {"RAY_ADDRESS": "auto"})
    assert find_cluster(environ) is None
    assert f"user {STRANGER} listens at {server[0]}" in capsys.readouterr().err
    assert not server[1]


def test_auto_does_not_send_the_token_to_an_unknown_user(record, environ, server, monkeypatch):
    monkeypatch.setattr(address, "SOCKET_TABLES", (record.parent / "missing",))  # as on systems other than Linux
    record.write_text(server[0])
    with pytest.raises(ConfigError, match=rf"expected RAY_ADDRESS=host:port. Try: RAY_ADDRESS={server[0]}"):
        find_cluster(environ | {"RAY_ADDRESS": "auto", "RAY_AUTH_MODE": "token"})
    assert not server[1]


def test_auto_names_a_cluster_of_this_user(record, environ, server, monkeypatch):
    tried = []
    monkeypatch.setattr(address, "probe", lambda at, given: tried.append((at, given["RAY_AUTH_MODE"])) or 0)
    record.write_text(server[0])
    assert find_cluster(environ | {"RAY_ADDRESS": "auto", "RAY_AUTH_MODE": "token"}) == server[0]
    assert tried == [(server[0], "token")]


@pytest.mark.skipif(not address.SOCKET_TABLES[0].exists(), reason="only Linux lists the owners of sockets")
@pytest.mark.parametrize(("host", "asked"), [("127.0.0.1", None), ("", "127.0.0.1"), ("::1", None), ("::", "::1")])
def test_owners_of_listening_sockets_are_found(host, asked):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with listener:
        port = listener.getsockname()[1]
        assert address.find_listeners(f"{asked or host}:{port}") == {os.geteuid()}
        assert address.find_listeners(f"203.0.113.77:{port}") == set()  # another machine
        assert address.find_listeners(f"localhost:{port}") == set()  # may have several addresses
    assert address.find_listeners(f"{asked or host}:{port}") == set()
