"""The reward server as a client sees it: real HTTP, real models, real signals."""

import http.client
import json
import math
import select
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.config.check import check
from openrlhf.config.commands import ServeRMConfig
from openrlhf.config.parser import parse
from openrlhf.errors import ConfigError
from openrlhf.inference.serve import bind, build_server, leave_a_core
from openrlhf.inference.served_model import ServedModel
from tests import json_strategies as js
from tests.commands import DEADLINE, FAST, FinishedRun, as_argv, command_environ, free_port, run_command
from tests.rl.toy_task import SMALL, make_prompts, read_rollouts
from tests.tiny import make_model
from tests.toy_data import PAIRS, pairs, write_rows
from tests.warm import warm_python

TEXTS = [("abcnopq xyz? " * 8)[start : start + length] for start in range(8) for length in (1, 2, 7, 30, 61)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains a reward model on pairs and returns its folder."""
    root = tmp_path_factory.mktemp("served")
    model = make_model(root / "model")

    def make(name, **flags):
        paths = {"pretrain": model, "save_path": str(root / name), "ckpt_path": str(root / f"{name}_ckpt")}
        run_command("train_rm", FAST | PAIRS | paths | {"dataset": write_rows(root / "pairs.jsonl", pairs(48))} | flags)
        return str(root / name)

    return make


@pytest.fixture(scope="module")
def reward_model(trained):
    return trained("rm")


def settings(**flags):
    return check(parse(ServeRMConfig, as_argv(flags), environ={}), lambda line: None)


@contextmanager
def serving(**flags):
    """Run a server in a thread of this process; yield the URL of its endpoint."""
    with bind("127.0.0.1", 0) as listener:
        server = build_server(settings(**flags))
        listener.listen()
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/get_reward"
        finally:
            server.should_exit = True
            thread.join(DEADLINE)


@pytest.fixture(scope="module")
def server(reward_model):
    with serving(reward_pretrain=reward_model, api_key="secret", max_request_mb=1) as url:
        yield url


def post(url, body, key="secret"):
    """Send a request and return (status, decoded answer); a body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=DEADLINE) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@torch.no_grad()
def plain_scores(folder, texts):
    """Score each text alone with plain Transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    read = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [model(torch.tensor([ids])).logits.item() for ids in read]


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("flags", [{}, {"packing_samples": True}, {"batch_size": 3}, {"batch_tokens": 64}], ids=str)
def test_concurrent_clients_get_the_scores_of_the_model_alone(reward_model, flags):
    expected = dict(zip(TEXTS, plain_scores(reward_model, TEXTS), strict=True))
    requests = [TEXTS[start : start + 1 + start % 4] for start in range(len(TEXTS))] * 3
    with serving(reward_pretrain=reward_model, **flags) as url, ThreadPoolExecutor(32) as clients:
        answers = list(clients.map(lambda texts: post(url, {"query": texts}, key=None), requests))
    assert {status for status, _ in answers} == {200}
    for texts, (_, answer) in zip(requests, answers, strict=True):
        assert answer["rewards"] == pytest.approx([expected[text] for text in texts], abs=1e-5)


def test_the_model_leaves_one_core_to_requests_unless_omp_num_threads_is_set(monkeypatch):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        leave_a_core()
        assert torch.get_num_threads() == 3
        monkeypatch.delenv("OMP_NUM_THREADS")
        for expected in (2, 1, 1):
            leave_a_core()
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_the_answer_fits_old_and_new_trainers(server, reward_model):
    texts = ["abc", "xyz</s>"]
    status, answer = post(server, {"query": texts, "prompts": ["a", "x"], "labels": [None, {"any": "thing"}]})
    assert status == 200
    assert answer["rewards"] == pytest.approx(plain_scores(reward_model, texts), abs=1e-5)
    assert answer["scores"] == answer["rewards"]
    assert answer["extra_logs"] == {"dummy_scores": answer["rewards"], "truncated": [0.0, 0.0]}
    assert post(server, {"queries": texts})[1]["rewards"] == answer["rewards"]
    assert post(server, {"query": "abc"})[1]["rewards"] == pytest.approx(answer["rewards"][:1], abs=1e-5)


def test_long_texts_are_truncated_and_counted(reward_model):
    texts = ["abcdefgh" * 3, "abcde"]
    with serving(reward_pretrain=reward_model, max_len=10) as url:
        _, answer = post(url, {"query": texts})
    assert answer["rewards"] == pytest.approx(plain_scores(reward_model, [text[:10] for text in texts]), abs=1e-5)
    assert answer["extra_logs"]["truncated"] == [1.0, 0.0]


def test_refuse_long_rejects_long_texts(reward_model):
    with serving(reward_pretrain=reward_model, max_len=10, refuse_long=True) as url:
        status, answer = post(url, {"query": ["abcde", "abcdefgh" * 3]})
        assert (status, answer["detail"]) == (
            413,
            "query 1 is too long: expected at most 10 tokens (--max_len), got 24",
        )
        assert post(url, {"query": ["abcdefghij"]})[0] == 200


def test_rewards_are_normalised_with_the_models_saved_statistics(reward_model):
    saved = json.loads((Path(reward_model) / "config.json").read_text())
    with serving(reward_pretrain=reward_model, normalize_reward=True) as url:
        _, answer = post(url, {"query": TEXTS})
    expected = [(score - saved["mean"]) / saved["std"] for score in plain_scores(reward_model, TEXTS)]
    assert answer["rewards"] == pytest.approx(expected, abs=1e-5)


def test_a_head_with_another_name_is_found(trained, reward_model):
    folder = trained("renamed", value_head_prefix="value_head")
    with serving(reward_pretrain=folder) as url:
        _, answer = post(url, {"query": TEXTS})
    assert answer["rewards"] == pytest.approx(plain_scores(reward_model, TEXTS), abs=1e-5)


def test_health_needs_no_key(server):
    with urllib.request.urlopen(server.replace("get_reward", "health"), timeout=DEADLINE) as response:
        assert json.load(response) == {"status": "ok"}


@pytest.mark.parametrize(("key", "complaint"), [(None, "no key"), ("secre", "a wrong key"), ("ключ", "a wrong key")])
def test_a_missing_or_wrong_key_is_rejected(server, key, complaint):
    key = key and key.encode().decode("latin-1")
    status, answer = post(server, {"query": ["abc"]}, key=key)
    assert status == 401
    assert complaint in answer["detail"]
    assert "--reward_api_key" in answer["detail"]
    assert "secret" not in answer["detail"]


REJECTED = {
    "not JSON": (b'{"query": ["abc"', 400, "the body is not JSON"),
    "not text": (b"\xff\xfe", 400, "the body is not JSON"),
    "nested too deep": (b"[" * 200_000, 400, "the body is not JSON"),
    "not an object": (["abc"], 422, "the body is of type list: expected an object"),
    "no query": ({"prompts": ["abc"]}, 422, "either query or queries"),
    "both": ({"query": ["a"], "queries": ["b"]}, 422, "either query or queries"),
    "not a list": ({"query": {"a": 1}}, 422, "query is invalid: expected a string or a non-empty list of strings"),
    "an empty list": ({"query": []}, 422, "non-empty list"),
    "a number": ({"query": ["abc", 5]}, 422, "query 1 is of type int: expected a string"),
    "an empty text": ({"query": ["abc", ""]}, 422, "query 1 has no tokens"),
    "half a character": (b'{"query": ["\\ud800"]}', 400, "a string contains half of a surrogate pair"),
    "thousands of digits": (b'{"query": ' + b"1" * 5000 + b"}", 400, "a number has thousands of digits"),
    "too many": ({"query": ["a"] * 8193}, 413, "too many queries in one request: expected at most 8192, got 8193"),
    "too large": ({"query": ["a" * (1 << 20)]}, 413, "at most 1 MiB (--max_request_mb)"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_rejected_request_says_why(server, case):
    body, expected, complaint = REJECTED[case]
    status, answer = post(server, body)
    assert (status, complaint in answer["detail"]) == (expected, True), answer
    assert post(server, {"query": ["abc"]})[0] == 200


queries = js.mostly(st.one_of(js.texts, st.lists(js.mostly(js.texts), max_size=3)))
bodies = st.one_of(
    js.some_of(query=queries, queries=queries, prompts=js.values, labels=js.values).map(json.dumps).map(str.encode),
    js.values.map(json.dumps).map(str.encode),
    st.binary(max_size=30),
)


@pytest.mark.slow(seconds=4)
@js.FUZZING
@given(body=bodies)
def test_any_body_gets_rewards_or_an_explanation(server, body):
    status, answer = post(server, body)
    if status == 200:
        assert all(math.isfinite(reward) for reward in answer["rewards"])
    else:
        assert status in (400, 422)
        assert answer["detail"]


def test_a_client_that_disconnects_during_its_request_causes_no_traceback(reward_model, capfd):
    begun = b"POST /get_reward HTTP/1.1\r\nHost: here\r\nContent-Length: 99\r\n\r\n{"
    with serving(reward_pretrain=reward_model) as url:
        with socket.create_connection(("127.0.0.1", urlsplit(url).port)) as leaving:
            leaving.sendall(begun)
        assert post(url, {"query": "a"})[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_other_paths_and_methods_are_rejected(server):
    assert post(server + "s", {"query": ["abc"]})[0] == 404
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(server, timeout=DEADLINE)


@pytest.mark.filterwarnings("ignore")
def test_a_score_of_nan_is_an_error(reward_model, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    torch.nn.init.constant_(model.score.weight, float("nan"))
    model.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(reward_model).save_pretrained(tmp_path / "broken")
    broken = str(tmp_path / "broken")
    with pytest.raises(ConfigError, match="computes nan for random tokens"):
        build_server(settings(reward_pretrain=broken))
    with serving(reward_pretrain=broken, skip_self_test=True) as url:
        status, answer = post(url, {"query": ["abc"]})
    assert (status, answer["detail"]) == (500, "the model's score of query 0 is nan: expected a finite number")


def test_models_that_are_not_outcome_reward_models_are_rejected(models, tmp_path):
    with pytest.raises(ConfigError, match="no weights for a scalar head called score"):
        build_server(settings(reward_pretrain=models()))
    steps = json.loads((Path(models()) / "config.json").read_text()) | {"placeholder_token": "#"}
    (tmp_path / "prm").mkdir()
    (tmp_path / "prm" / "config.json").write_text(json.dumps(steps))
    with pytest.raises(ConfigError, match="is a process reward model"):
        build_server(settings(reward_pretrain="./prm"))
    AutoModelForSequenceClassification.from_pretrained(models(), num_labels=3).save_pretrained("classes")
    with pytest.raises(ConfigError, match="is a classifier with 3 classes"):
        build_server(settings(reward_pretrain="./classes"))


def test_unusable_addresses_are_explained():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port} is taken on 127.0.0.1. Try: --port {port + 1}"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host 192.0.2.1 --port 5000 cannot be bound"):
        bind("192.0.2.1", 5000)


# The trainer as a client.


def train_one_step(tmp_path, models, **flags):
    paths = {"pretrain": models(), "save_path": "./out", "ckpt_path": "./out_ckpt"}
    prompts = {"prompt_data": write_rows(tmp_path / "prompts.jsonl", make_prompts(16)), "max_steps": 1}
    run_command("train_ppo", paths | SMALL | prompts | flags)
    return FinishedRun(tmp_path / "out", tmp_path / "out_ckpt")


def test_a_trainer_with_the_key_gets_rewards_and_never_records_the_key(server, reward_model, tmp_path, models):
    ran = train_one_step(
        tmp_path, models, remote_rm_url=f"{server}?token=letmein", reward_api_key="secret", save_steps=1
    )
    rows = read_rollouts(ran, 1)
    tokenizer = AutoTokenizer.from_pretrained(models())
    texts = [tokenizer.decode(row["input_ids"]) for row in rows]
    unpadded = [
        place for place, text in enumerate(texts) if "<pad>" not in text
    ]  # plain Transformers ignores pad tokens
    assert len(unpadded) > 20
    expected = plain_scores(reward_model, [texts[place] for place in unpadded])
    assert [rows[place]["reward"] for place in unpadded] == pytest.approx(expected, abs=1e-5)
    written = [file for file in tmp_path.rglob("*.json*") if file.is_file()]
    assert any('"reward_api_key": "***"' in file.read_text() for file in written)
    assert any('/get_reward?token=***"' in file.read_text() for file in written)
    assert not any('"secret"' in file.read_text() or "letmein" in file.read_text() for file in written)


def test_a_trainer_without_the_key_is_told_the_flag(server, tmp_path, models, capsys):
    with pytest.raises(SystemExit):
        train_one_step(tmp_path, models, remote_rm_url=server)
    stderr = capsys.readouterr().err
    assert "refused the request: 401" in stderr
    assert "--reward_api_key" in stderr


# Clients that hold connections open, and signals.


@contextmanager
def server_process(reward_model, **flags):
    """Run the command as a process; yield the process and its port once it answers."""
    port = free_port()
    argv = as_argv({"reward_pretrain": reward_model, "port": port} | flags)
    program = [*warm_python(), "-m", "openrlhf.cli.serve_rm", *argv]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True, env=command_environ()) as server:
        watchdog = threading.Timer(DEADLINE, server.kill)
        watchdog.start()
        try:
            assert any("answers on" in line for line in server.stderr)
            yield server, int(port)
        finally:
            server.kill()
            watchdog.cancel()


HEAD = b"POST /get_reward HTTP/1.1\r\nHost: x\r\n"
INCOMPLETE = {  # what a client sends before it stops sending
    "nothing": b"",
    "half of the headers": HEAD + b"Content-Le",
    "half of the body": HEAD + b'Content-Length: 99\r\n\r\n{"query"',
    "half of a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n99\r\n{",
    "half of a second request": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD,
}


def connect(stack, port, begun=b""):
    client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE))
    client.sendall(begun)
    return client


def read_to_end(client):
    """Return what the server sends until it closes the connection."""
    received = b""
    with suppress(ConnectionError):
        while data := client.recv(1000):
            received += data
    return received


@pytest.mark.slow(seconds=6)
def test_connections_that_wait_for_their_client_are_closed(reward_model):
    with server_process(reward_model, request_timeout=1) as (_, port), ExitStack() as stack:
        clients = {name: connect(stack, port, begun) for name, begun in INCOMPLETE.items()}
        silent = [connect(stack, port) for _ in range(300)]
        slow = connect(stack, port, HEAD)
        with suppress(ConnectionError):  # one more byte of a header again and again, until the server closes
            for _ in range(100):
                if select.select([slow], [], [], 0.1)[0]:
                    break
                slow.sendall(b"a")
        assert post(f"http://127.0.0.1:{port}/get_reward", {"query": "abc"})[0] == 200
        for client in (slow, *clients.values(), *silent):
            client.settimeout(10)
        assert b"408 Request Timeout" in read_to_end(slow)
        for name, client in clients.items():
            assert (b"408" in read_to_end(client)) == (name != "half of a second request"), name
        assert all(b"408" in read_to_end(client) for client in silent)


def test_a_client_without_a_key_cannot_fill_the_memory_with_headers(server):
    with ExitStack() as stack:
        client = connect(stack, urlsplit(server).port, HEAD)
        with pytest.raises(ConnectionError):
            client.sendall(b"a: b\r\n" * (1 << 22))
    assert post(server, {"query": "abc"})[0] == 200


@pytest.mark.slow(seconds=4)
def test_silent_connections_cannot_lock_others_out(reward_model):
    with server_process(reward_model, max_connections=8) as (_, port), ExitStack() as stack:
        silent = [connect(stack, port) for _ in range(100)]
        for _ in range(600):  # 60 s
            closed = select.select(silent, [], [], 0.1)[0]
            if len(closed) >= 92:
                break
        assert len(closed) >= 92
        assert post(f"http://127.0.0.1:{port}/get_reward", {"query": "abc"})[0] == 200


@pytest.mark.slow(seconds=5)
def test_a_stopping_server_does_not_wait_for_clients_that_never_finish(reward_model):
    with server_process(reward_model, stop_timeout=1) as (server, port), ExitStack() as stack:
        clients = [connect(stack, port, begun) for begun in (*INCOMPLETE.values(), *[b""] * 300)]
        waited_for = connect(stack, port, HEAD + b"Content-Length: 99\r\nExpect: 100-continue\r\n\r\n")
        assert b"100 Continue" in waited_for.recv(100)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert b"503 Service Unavailable" in read_to_end(waited_for)
        assert "Traceback" not in server.stderr.read()
        assert all(read_to_end(client) is not None for client in clients)


@pytest.mark.slow(seconds=4)
def test_a_stopping_server_does_not_wait_for_queries_that_take_long(reward_model):
    with server_process(reward_model, stop_timeout=1, max_request_mb=64) as (server, port), ExitStack() as stack:
        body = json.dumps({"query": ["abcdefgh" * 1000] * 8000}).encode()
        busy = connect(stack, port, HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=DEADLINE) as response:
            assert response.status == 200  # others are still served
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        read_to_end(busy)


def test_an_endless_body_is_cut_off(server):
    address = urlsplit(server)
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    sent = 0
    with socket.create_connection((address.hostname, address.port), timeout=DEADLINE) as client:
        client.sendall(HEAD + b"Authorization: Bearer secret\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):
            while sent < 64 << 20:
                client.sendall(chunk)
                sent += len(chunk)
    assert sent < 64 << 20  # 4 MiB are read, and the rest is what buffers hold


def test_the_connection_is_closed_after_a_body_that_is_too_large(server):
    address = urlsplit(server)
    size = (1 << 20) + 1
    head = HEAD + f"Authorization: Bearer secret\r\nContent-Length: {size}\r\n\r\n".encode()
    with socket.create_connection((address.hostname, address.port), timeout=DEADLINE) as client:
        client.sendall(head + b" " * size)
        response = read_to_end(client).lower()
    assert response.startswith(b"http/1.1 413")
    assert b"connection: close" in response


def test_queries_are_counted_before_they_are_tokenised(reward_model, monkeypatch):
    """Otherwise any number of requests passes the check while the first ones are tokenised."""
    begun, go_on = threading.Event(), threading.Event()

    def tokenize(model, texts, tokenize=ServedModel.tokenize):
        begun.set()
        assert go_on.wait(DEADLINE)
        return tokenize(model, texts)

    monkeypatch.setattr(ServedModel, "tokenize", tokenize)
    monkeypatch.setattr("openrlhf.inference.serve_app.MAX_WAITING", 3)
    with serving(reward_pretrain=reward_model) as url, ThreadPoolExecutor(2) as clients:
        first = clients.submit(post, url, {"query": ["a", "b"]})
        assert begun.wait(DEADLINE)
        second = clients.submit(post, url, {"query": ["c", "d"]})
        wait([second], timeout=10)
        go_on.set()
        assert first.result()[0] == 200
        assert second.result() == (503, {"detail": "too many queries are waiting; try again later"})
        assert post(url, {"query": ["c", "d"]})[0] == 200  # nothing stays reserved


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_a_stopping_server_answers_requests_in_flight(reward_model, number, code):
    port = free_port()
    argv = as_argv({"reward_pretrain": reward_model, "port": port})
    program = [*warm_python(), "-m", "openrlhf.cli.serve_rm", *argv]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True, env=command_environ()) as server:
        watchdog = threading.Timer(DEADLINE, server.kill)
        watchdog.start()
        before = list(takewhile(lambda line: "answers on" not in line, server.stderr))
        body = json.dumps({"query": ["abc"]}).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE) as client:
            head = (
                f"POST /get_reward HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
            )
            client.sendall(head.encode())
            assert b"100 Continue" in client.recv(100)  # the server waits for this body
            server.send_signal(number)
            assert any("stopping when the requests in flight are answered" in line for line in server.stderr)
            client.sendall(body)
            response = http.client.HTTPResponse(client)
            response.begin()
            answer = json.loads(response.read())
        assert server.wait(DEADLINE) == code
        watchdog.cancel()
    assert "Loading" not in "".join(before)  # Transformers' progress bar
    assert answer["rewards"] == pytest.approx(plain_scores(reward_model, ["abc"]), abs=1e-5)
