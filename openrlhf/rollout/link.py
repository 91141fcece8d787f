"""Authenticated connections: a socket that only processes with a shared secret can use, with a deadline on every wait.

A weight channel (channel.py) uses them. Both ends first prove that they know the secret, without sending it:

    server                                              client
    32 random bytes                         ->
                                            <-          32 random bytes, HMAC("client", both)
    HMAC("server", both)                    ->

The random bytes are new for each connection, so a recorded handshake cannot be replayed. After the handshake, each
message is preceded by its length. Messages are bytes that the caller parses, never pickles. They are not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from openrlhf.errors import RolloutError

HANDSHAKE_SECONDS = 10.0  # time limit for a client to prove that it knows the secret
MAX_HANDSHAKES = 64  # concurrent handshakes besides those expected; a further connection closes the oldest of them
MAX_MESSAGE = 1 << 26  # bytes; headers are a few hundred kilobytes
ACCEPT_PAUSE = 0.05  # seconds before another attempt to accept, after one failed
NONCE = 32  # bytes
LENGTH = struct.Struct("!Q")  # precedes each message


def keep_alive(connection: socket.socket, *, idle: int, interval: int, probes: int) -> None:
    """Notice a machine that disappears without closing its connections; Linux takes the times, in seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": idle, "TCP_KEEPINTVL": interval, "TCP_KEEPCNT": probes}.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Link:
    """One end of an authenticated connection.

    Waits that take too long raise TimeoutError; a connection that the other end closed raises ConnectionError. One
    thread may send while another receives, if both use the same timeout, because a socket has only one.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection, idle=15, interval=5, probes=6)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: bytes, seconds: float) -> None:
        self.send_raw(memoryview(LENGTH.pack(len(message)) + message), seconds)

    def receive(self, seconds: float) -> bytes:
        """Return the next message."""
        deadline = time.monotonic() + seconds
        (length,) = LENGTH.unpack(self.receive_raw(bytearray(LENGTH.size), seconds))
        if length > MAX_MESSAGE:
            raise ConnectionError(f"a message is too long: expected at most {MAX_MESSAGE} bytes, got {length}")
        return bytes(self.receive_raw(bytearray(length), deadline - time.monotonic()))

    def send_raw(self, data: memoryview, seconds: float) -> None:
        """Send bytes without their length, which the receiver must know."""
        self.socket.settimeout(seconds)
        self.socket.sendall(data)

    def receive_raw(self, buffer: bytearray | memoryview, seconds: float) -> bytearray | memoryview:
        """Fill the buffer and return it."""
        deadline = time.monotonic() + seconds
        rest = memoryview(buffer)
        while rest:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            count = self.socket.recv_into(rest)
            if count == 0:
                raise ConnectionError("the other end closed the connection")
            rest = rest[count:]
        return buffer

    def is_closed(self) -> bool:
        """Return whether the other end closed the connection; nothing is read."""
        self.socket.settimeout(0.0)
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection; threads that wait for it get an error."""
        with suppress(OSError):  # the other end closed it first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def connect(host: str, port: int, secret: bytes, seconds: float) -> Link:
    """Connect to a `LinkServer`; raise ConnectionError if the server does not know the secret."""
    link = Link(socket.create_connection((host, port), seconds))
    try:
        challenge = bytes(link.receive_raw(bytearray(NONCE), seconds))
        own = secrets.token_bytes(NONCE)
        link.send_raw(memoryview(own + prove(secret, b"client", challenge + own)), seconds)
        proof = link.receive_raw(bytearray(NONCE), seconds)
        if not hmac.compare_digest(proof, prove(secret, b"server", challenge + own)):
            raise ConnectionError("the other end does not know the secret of this channel")
    except BaseException:
        link.close()
        raise
    return link


def prove(secret: bytes, role: bytes, challenges: bytes) -> bytes:
    return hmac.digest(secret, role + challenges, "sha256")


class LinkServer:
    """A socket on one address that passes each authenticated connection to `accepted`, in a separate thread.

    Clients that do not prove in time that they know the secret are disconnected. They cannot keep others out: a client
    that knows the secret proves it long before MAX_HANDSHAKES newer connections of others arrive. `clients` of those
    that know it may connect at the same time.
    """

    def __init__(self, host: str, secret: bytes, accepted: Callable[[Link], None], clients: int = 1) -> None:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        try:
            self.socket = socket.create_server(address[:2], family=family, backlog=1024)
        except OSError as error:
            raise RolloutError(
                f"the weight channel cannot listen on {host}: {error.strerror or error}; expected an address of this "
                "machine",
                try_this="ray start --node-ip-address <an address of the node that the other nodes can reach>",
            ) from error
        self.port: int = self.socket.getsockname()[1]
        self.secret = secret
        self.accepted = accepted
        self.max_handshakes = MAX_HANDSHAKES + clients
        self.closed = False
        self.lock = threading.Lock()
        self.unproven: dict[socket.socket, None] = {}  # connections in their handshake, oldest first
        threading.Thread(target=self._accept, daemon=True, name="openrlhf-channel").start()

    def _accept(self) -> None:
        while not self.closed:
            try:
                connection, _ = self.socket.accept()
            except OSError:  # the client disconnected, this process has too many open files, or the server is closed
                time.sleep(ACCEPT_PAUSE)
                continue
            with self.lock:
                if len(self.unproven) == self.max_handshakes:
                    oldest = next(iter(self.unproven))
                    del self.unproven[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
                self.unproven[connection] = None
            threading.Thread(target=self._authenticate, args=(connection,), daemon=True).start()

    def _authenticate(self, connection: socket.socket) -> None:
        """Pass the connection on if the client proves that it knows the secret; close it otherwise."""
        known = False
        try:
            link = Link(connection)
            challenge = secrets.token_bytes(NONCE)
            link.send_raw(memoryview(challenge), HANDSHAKE_SECONDS)
            answer = bytes(link.receive_raw(bytearray(2 * NONCE), HANDSHAKE_SECONDS))
            own, proof = answer[:NONCE], answer[NONCE:]
            if hmac.compare_digest(proof, prove(self.secret, b"client", challenge + own)) and self._leave(connection):
                link.send_raw(memoryview(prove(self.secret, b"server", challenge + own)), HANDSHAKE_SECONDS)
                known = True
                self.accepted(link)
        except (OSError, ValueError, TypeError):  # the client disconnected, timed out or sent an invalid message
            known = False
        finally:
            if not known:
                self._leave(connection)
                connection.close()

    def _leave(self, connection: socket.socket) -> bool:
        """End the handshake of a connection; return False if it was closed in favour of a newer one."""
        with self.lock:
            return self.unproven.pop(connection, False) is None

    def close(self) -> None:
        self.closed = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self.socket.close()
