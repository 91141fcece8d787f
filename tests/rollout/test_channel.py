"""Weight channels between real processes; the receivers get their instructions through pipes."""

import multiprocessing
import socket
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
import torch
from torch import distributed as dist

from openrlhf.errors import BackendError, RolloutError
from openrlhf.rollout import link
from openrlhf.rollout.bucket import ALIGNMENT
from openrlhf.rollout.channel import Channel, Join
from openrlhf.rollout.checksum import checksum
from openrlhf.rollout.link import NONCE, prove
from openrlhf.rollout.weight_receiver import IncomingWeights, WeightReceiver
from openrlhf.rollout.weight_sender import WeightSender

pytestmark = pytest.mark.slow(seconds=2)

SPAWN = multiprocessing.get_context("spawn")
BUCKET = 4096  # bytes: small, so that a few tensors need several
PATIENT, HASTY = 60.0, 4.0  # seconds: a watchdog, and a short timeout for tests of the timeout itself


def weights(version):
    generator = torch.Generator().manual_seed(version)
    yield "scalar", torch.tensor(float(version))
    yield "empty", torch.empty(0, 4)
    for number in range(20):
        yield f"layers.{number}", torch.randn(7, 11 + number, generator=generator)
    yield "larger.than.a.bucket", torch.randn(50, 60, generator=generator)
    yield "half", torch.randn(33, generator=generator).to(torch.bfloat16)
    yield "bytes", torch.arange(9, dtype=torch.uint8)
    yield "flags", torch.tensor([True, False, True])
    yield "long", torch.arange(5)
    yield "transposed", torch.randn(6, 8, generator=generator).T
    yield "eight.bits", torch.randn(10, generator=generator).to(torch.float8_e4m3fn)


def broken():
    for number, pair in enumerate(weights(0)):
        if number == 15:
            raise ValueError("the shard is torn")
        yield pair


def receive(incoming: IncomingWeights) -> dict[str, object]:
    found = {}
    for name, tensor in incoming:
        assert tensor.data_ptr() % ALIGNMENT == 0
        found[name] = (checksum(tensor), tensor.dtype, tuple(tensor.shape))
    return found


def serve_receiver(pipe) -> None:
    """Answer each `IncomingWeights` with what arrived or with the error's text; `only` limits the number of tensors."""
    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        incoming, only = pipe.recv()
        try:
            if only is None:
                pipe.send(receive(incoming))
            else:
                stream = iter(incoming)
                pipe.send([next(stream)[0] for _ in range(only)])
                stream.close()
        except RolloutError as error:
            pipe.send(str(error))


@contextmanager
def receivers(count):
    pairs = []
    for _ in range(count):
        here, there = SPAWN.Pipe()
        process = SPAWN.Process(target=serve_receiver, args=(there,), daemon=True)
        process.start()
        pairs.append((process, here))
    assert answers(pairs) == ["ready"] * count  # so that deadlines do not count the start of Python
    try:
        yield pairs
    finally:
        for process, _ in pairs:
            process.kill()
            process.join()


def make_sender(count, timeout=PATIENT, patience=None):
    waits = {"timeout": timeout, "patience": patience or timeout}
    return WeightSender(Channel("127.0.0.1", "tcp", count, bucket_bytes=BUCKET, **waits), torch.device("cpu"))


def ask(pairs, sender, version, only=None):
    for number, (_, pipe) in enumerate(pairs):
        pipe.send((IncomingWeights(sender.channel, number, version), only))


def answers(pairs):
    return [pipe.recv() for _, pipe in pairs]


def expected(version):
    return {name: (checksum(tensor), tensor.dtype, tuple(tensor.shape)) for name, tensor in weights(version)}


def send(sender, pairs, version):
    ask(pairs, sender, version)
    sums = sender.send(weights(version), version, verify=True)
    assert answers(pairs) == [expected(version)] * len(pairs)
    assert sums == {name: found[0] for name, found in expected(version).items()}


@pytest.mark.parametrize("count", [1, 2])
def test_every_receiver_gets_every_tensor_of_every_version(count):
    with receivers(count) as pairs:
        sender = make_sender(count)
        for version in (1, 2, 5):
            send(sender, pairs, version)
        ask(pairs, sender, 6)
        assert sender.send([], 6) == {}
        assert answers(pairs) == [{}] * count
        sender.close()
        with pytest.raises(BackendError, match="create a new one"):
            sender.send([], 7)


def test_a_receiver_answers_once_per_version():
    with receivers(2) as pairs:
        sender = make_sender(2)
        for version in (1, 2):
            send(sender, pairs, version)
        assert [receiver.answers for receiver in sender.receivers.values()] == [2, 2]
        sender.close()


def test_an_iterator_that_raises_tells_the_receivers_and_the_channel_stays_usable():
    with receivers(2) as pairs:
        sender = make_sender(2)
        ask(pairs, sender, 1)
        with pytest.raises(ValueError, match="torn"):
            sender.send(broken(), 1)
        assert answers(pairs) == ["the weight sender failed: ValueError: the shard is torn"] * 2
        send(sender, pairs, 2)
        sender.close()


def test_a_receiver_that_stops_early_fails_the_send_and_a_new_channel_works():
    with receivers(1) as pairs:
        sender = make_sender(1)
        ask(pairs, sender, 1, only=3)
        with pytest.raises(RolloutError, match="weight receiver 0 stopped before it had loaded all weights"):
            sender.send(weights(1), 1)
        assert answers(pairs) == [["scalar", "empty", "layers.0"]]
        send(make_sender(1), pairs, 1)


def test_a_new_channel_replaces_a_receiver_that_died():
    with receivers(2) as (dies, lives):
        sender = make_sender(2, HASTY)
        send(sender, [dies, lives], 1)
        dies[0].kill()
        dies[0].join()
        lives[1].send((IncomingWeights(sender.channel, 1, 2), None))
        with pytest.raises(RolloutError, match="receiver"):
            sender.send(weights(2), 2)
        assert "the weight sender" in lives[1].recv()
        with receivers(1) as fresh:
            send(make_sender(2), [lives, *fresh], 2)


def test_call_off_stops_a_waiting_sender():
    sender = make_sender(2)
    sender.channel.call_off()
    with pytest.raises(RolloutError, match="weight receivers 0, 1 did not join before the weight sync was called off"):
        sender.send(weights(1), 1)
    sender.channel.call_off()  # has no effect once the sender is gone


def test_a_missing_receiver_is_named():
    with receivers(1) as pairs:
        sender = make_sender(2, HASTY)
        ask(pairs, sender, 1)
        with pytest.raises(RolloutError, match="weight receiver 1 did not join within 4 s"):
            sender.send(weights(1), 1)
        sender.close()
        assert "closed the channel: the sender or another receiver failed, or one did not join" in answers(pairs)[0]


def test_receivers_wait_for_a_sender_that_has_a_step_to_finish_first():
    sender = make_sender(2, HASTY, PATIENT)
    with receivers(2) as pairs:
        ask(pairs, sender, 1)
        assert not pairs[0][1].poll(2 * HASTY)  # neither gave up
        assert sender.send(weights(1), 1, verify=True)
        assert answers(pairs) == [expected(1)] * 2


def test_a_sender_that_never_begins_is_named():
    sender = make_sender(1, HASTY)
    with receivers(1) as pairs:
        ask(pairs, sender, 1)
        assert "did not send the next weights within 4 s (header 0 of version 1)" in answers(pairs)[0]


def test_a_missing_sender_is_named():
    sender = make_sender(1, HASTY)
    with receivers(1) as pairs:
        send(sender, pairs, 1)
        ask(pairs, sender, 2)
        assert "did not send the next weights within 4 s (header 0 of version 2)" in answers(pairs)[0]


def listening():
    """Return the addresses on which this process accepts connections."""
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def test_the_channel_listens_on_its_own_address_only():
    before = listening()
    sender = make_sender(1)
    assert listening() - before == {("127.0.0.1", sender.channel.port)}
    sender.close()
    assert listening() == before


def test_torch_cannot_read_the_channel_as_a_store():
    """A store would reveal its keys, including those needed to join."""
    sender = make_sender(1)
    with pytest.raises(dist.DistError):
        dist.TCPStore("127.0.0.1", sender.channel.port, is_master=False, timeout=timedelta(seconds=1)).num_keys()
    sender.close()


def heard(connection):
    """Return what the other end sends until it closes the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while data := connection.recv(4096):
            found += data
    return found


def test_unauthenticated_clients_are_rejected_and_the_transfer_continues():
    """One has a wrong secret, one sends garbage, one sends nothing, and one replays a receiver's messages."""
    sender = make_sender(1)
    with pytest.raises(RolloutError, match="did not accept receiver 0: the other end closed the connection"):
        next(iter(IncomingWeights(replace(sender.channel, secret=b"guessed"), 0, 1)))

    def connect():
        return socket.create_connection(("127.0.0.1", sender.channel.port), PATIENT)

    with receivers(1) as pairs, connect() as silent, connect() as garbage, connect() as known, connect() as replaying:
        garbage.sendall(bytes(4096))
        assert len(heard(garbage)) <= NONCE  # the challenge, at most
        answer = bytes(NONCE) + prove(sender.channel.secret, b"client", known.recv(NONCE) + bytes(NONCE))
        known.sendall(answer)
        assert len(known.recv(NONCE)) == NONCE  # the sender's own proof
        replaying.sendall(answer + Join(0).encode())
        assert len(heard(replaying)) <= NONCE
        send(sender, pairs, 1)
        assert len(silent.recv(4096)) == NONCE
    sender.close()


def test_silent_clients_do_not_block_receivers(monkeypatch):
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 10 * PATIENT)
    sender = make_sender(1)
    with ExitStack() as stack, receivers(1) as pairs:
        for _ in range(3 * link.MAX_HANDSHAKES):
            stack.enter_context(socket.create_connection(("127.0.0.1", sender.channel.port), PATIENT))
        send(sender, pairs, 1)
    sender.close()


def test_many_receivers_join_at_the_same_time():
    """They are threads that begin their handshakes together."""
    count = 2 * link.MAX_HANDSHAKES + 8
    sender, barrier, found = make_sender(count), threading.Barrier(count), [0] * count

    def run(number):
        barrier.wait()
        found[number] = sum(1 for _ in WeightReceiver(sender.channel, number).receive(1))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    sender.send(weights(1), 1)
    for thread in threads:
        thread.join()
    assert set(found) == {len(expected(1))}
    sender.close()


def test_a_receiver_rejects_a_sender_without_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impersonate():
            connection, _ = server.accept()
            with connection:
                connection.sendall(bytes(2 * NONCE))
                heard(connection)

        threading.Thread(target=impersonate, daemon=True).start()
        channel = Channel("127.0.0.1", "tcp", 1, port=server.getsockname()[1], secret=b"known", timeout=PATIENT)
        with pytest.raises(RolloutError, match="does not know the secret"):
            next(iter(IncomingWeights(channel, 0, 1)))


def test_the_secret_is_not_printed():
    assert "secret" not in repr(IncomingWeights(make_sender(1).channel, 0, 1))


def test_a_channel_listens_only_on_an_address_of_this_machine():
    with pytest.raises(RolloutError, match=r"cannot listen on 192\.0\.2\.1.*expected an address of this machine"):
        WeightSender(Channel("192.0.2.1", "tcp", 1), torch.device("cpu"))  # an address reserved for documentation


def test_expandable_segments_cannot_be_shared(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(RolloutError, match="expandable segments"):
        WeightSender(Channel("127.0.0.1", "ipc", 1), torch.device("cpu"))
