import base64
import json
import re
import threading
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest
from sessions import WATCHDOG, Scripted, numbered, prompt, run, run_all

from openrlhf.agents.reward_server import RewardServer, read_pause
from openrlhf.agents.rewards import ServerRewards
from openrlhf.agents.single_turn import SingleTurnSamples
from openrlhf.errors import RewardError


@contextmanager
def serving(*answers):
    """Serve rewards; request k gets answer k or the last one: a fault, a function, or (status, text[, headers])."""
    received, released = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = answers[min(len(received), len(answers) - 1)]
            received.append((body, dict(self.headers)))
            if answer == "close":
                return
            if answer == "hang":
                released.wait(30)
                return
            status, text, *headers = answer(body) if callable(answer) else answer
            self.send_response(status)
            for name, value in dict(*headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/get_reward", received
    finally:
        released.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def dripping(first, rest, *, pause):
    """Accept connections, answer with `first`, and then with `rest` again and again; yield host:port."""
    ended = threading.Event()

    class Handler(BaseRequestHandler):
        def handle(self):
            with suppress(OSError):  # the client has gone
                self.request.sendall(first)
                while not ended.wait(pause):
                    self.request.sendall(rest)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        ended.set()
        server.shutdown()
        thread.join()


def by_length(body):
    return 200, json.dumps({"rewards": [len(query) for query in body["query"]]})


@pytest.fixture
def through(tokenizer):
    def make(*urls, timeout=10.0, on_error="stop", **options):
        servers = [RewardServer(url, timeout, first_pause=0.01, **options) for url in urls]
        return SingleTurnSamples(ServerRewards(servers), tokenizer, context_length=64, on_error=on_error)

    return make


def test_group_is_one_request(through):
    answer = json.dumps({"rewards": [1, 2], "scores": [0, 0.5], "extra_logs": {"a": [3, 4], "b": 5}})
    with serving((200, answer)) as (url, received):
        got = run(through(url, api_key="secret"), numbered(2), asked=prompt(label={"answer": 2}))
    assert [(item.reward, item.score) for item in got.trajectories] == [(1.0, 0.0), (2.0, 0.5)]
    assert [item.extra_logs for item in got.trajectories] == [{"a": 3.0, "b": 5.0}, {"a": 4.0, "b": 5.0}]
    ((body, headers),) = received
    assert body == {"query": ["1+1=0", "1+1=1"], "prompts": ["1+1="] * 2, "labels": [{"answer": 2}] * 2}
    assert headers["Authorization"] == "Bearer secret"


def test_servers_take_turns_and_results_stay_in_order(through):
    with serving(by_length) as (first, received_first), serving(by_length) as (second, received_second):
        groups = [(prompt("1" * (n + 1), index=n), [Scripted("x" * (n + 1))]) for n in range(6)]
        got = run_all(through(first, second), groups)
    assert [item.trajectories[0].reward for item in got] == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert (len(received_first), len(received_second)) == (3, 3)


@pytest.mark.parametrize("fault", [(500, "busy"), (408, "slow"), (429, "busy", {"Retry-After": "soon"}), "close"])
def test_temporary_failure_is_retried(through, fault):
    with serving(fault, fault, by_length) as (url, received):
        got = run(through(url), [Scripted("2")])
    assert got.trajectories[0].reward == 5.0
    assert len(received) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, "busy"), "failed 5 times, the last time with: status 500 busy"),
        ("close", "failed 5 times, the last time with: RemoteDisconnected"),
    ],
)
def test_permanent_failure_names_the_server(through, answer, message):
    with serving(answer) as (url, received), pytest.raises(RewardError) as error:
        run(through(url), [Scripted("2")])
    assert f"reward server {url} {message}" in str(error.value)
    assert len(received) == 5


def test_server_that_never_answers_times_out(through):
    started = time.monotonic()
    with serving("hang") as (url, received), pytest.raises(RewardError, match="failed 5 times") as error:
        run(through(url, timeout=0.2), [Scripted("2")])
    assert url in str(error.value)
    assert len(received) == 5
    assert time.monotonic() - started < WATCHDOG


def test_a_retry_waits_as_long_as_the_server_asks(through):
    with serving((503, "busy", {"Retry-After": "1"}), by_length) as (url, received):
        started = time.monotonic()
        assert run(through(url), [Scripted("2")]).trajectories[0].reward == 5.0
    assert time.monotonic() - started >= 1
    assert len(received) == 2


def test_the_pause_that_a_server_asks_for_is_bounded():
    in_30_seconds = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 0 < read_pause(in_30_seconds) <= 30
    asked = [None, "7", "999999", "9" * 500, "-1", "soon", "nan", "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 9999"]
    assert [read_pause(header) for header in asked] == [0.0, 7.0, 60.0, 60.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_an_error_and_carries_neither_key_nor_samples(through, status):
    with serving(by_length) as (other, received_other):
        target = other.replace("http://", "http://user:word@")
        with serving((status, "", {"Location": target})) as (url, received), pytest.raises(RewardError) as error:
            run(through(url, api_key="secret"), [Scripted("2")])
    assert f"{url} answered {status}, a redirect to " in str(error.value)
    assert "word" not in str(error.value)
    assert (len(received), received_other) == (1, [])


def test_credentials_in_the_address_are_sent_and_never_shown(through):
    with serving((404, "no such path")) as (url, received):
        address = url.replace("http://", "http://me:pass%20word@") + "?token=abcdef&hidden"
        with pytest.raises(RewardError) as error:
            run(through(address, api_key="secret"), [Scripted("2")])
    assert received[0][1]["Authorization"] == "Basic " + base64.b64encode(b"me:pass word").decode()
    shown = url.replace("http://", "http://***@") + "?token=***&***"
    assert f"reward server {shown} refused the request: 404 no such path" in str(error.value)


@pytest.mark.parametrize("address", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://127.0.0.1:port/", "http://"])
def test_an_address_that_is_not_http_is_rejected_immediately(through, address):
    with pytest.raises(RewardError, match="has an invalid address"):
        run(through(address), [Scripted("2")])


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("/?token=one two", None),
        ("/?token=one\x7ftwo", None),
        ("/", "one\ntwo"),
        ("/", "onetwo\u20ac"),
    ],
)
def test_an_address_or_key_that_is_invalid_in_http_is_not_shown(through, address, key):
    with serving(by_length) as (url, received), pytest.raises(RewardError, match="cannot be called") as error:
        run(through(url + address, api_key=key), [Scripted("2")])
    assert url in str(error.value)
    assert not re.search("one|two", str(error.value))
    assert received == []


def test_an_endless_answer_is_rejected(through, monkeypatch):
    monkeypatch.setattr("openrlhf.agents.reward_server.LARGEST_ANSWER", 1 << 20)
    endless = dripping(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 100_000, pause=0)
    with endless as address, pytest.raises(RewardError, match="is too large: expected at most 1 MiB"):
        run(through(f"http://{address}/"), [Scripted("2")])


SLOW = {
    "status": ("http", b"HTTP/1.1 ", b"2"),
    "headers": ("http", b"HTTP/1.1 200 OK\r\n", b"a"),
    "body": ("http", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "),
    "error body": ("http", b"HTTP/1.1 500 No\r\nContent-Length: 1000000\r\n\r\n", b" "),
    "TLS handshake": ("https", b"\x16\x03\x03\x3f\x00", b"\x02"),
}


@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("part", SLOW)
def test_a_server_that_answers_byte_by_byte_leaves_no_thread(through, part):
    """Each byte arrives before a timeout of single reads; only a deadline for the whole request ends this."""
    scheme, first, rest = SLOW[part]
    with dripping(first, rest, pause=0.02) as address:
        with pytest.raises(RewardError, match=r"failed 5 times, the last time with: no answer within 0\.2 s"):
            run(through(f"{scheme}://{address}/", timeout=0.2), [Scripted("2")])
        threads = [one for one in threading.enumerate() if one.name == "openrlhf-reward-server"]
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)


def test_unreachable_server_is_named(through):
    with serving(by_length) as (url, _):
        pass
    with pytest.raises(RewardError, match=f"{url} failed 5 times.*refused"):
        run(through(url), [Scripted("2")])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, "<html>"), "not JSON: '<html>'"),
        ((200, "[1]"), "answered [1]: expected a JSON object"),
        ((404, "no such path"), "refused the request: 404 no such path"),
        ((200, '{"reward": [1]}'), "without 'rewards'"),
        ((200, '{"rewards": [1, 2]}'), "2 values for 1 sample"),
        ((200, '{"rewards": [null]}'), "the reward is None"),
        ((200, '{"rewards": [NaN]}'), "the reward is nan"),
    ],
)
def test_malformed_answer_is_an_error_without_a_retry(through, answer, message):
    with serving(answer) as (url, received), pytest.raises(RewardError) as error:
        run(through(url), [Scripted("2")])
    assert message in str(error.value)
    assert url in str(error.value)
    assert len(received) == 1


def test_skipped_failures_are_counted(through):
    with serving((200, '{"rewards": [1, null, 3]}')) as (url, _):
        got = run(through(url, on_error="skip"), numbered(3))
    assert [item.reward for item in got.trajectories] == [1.0, 3.0]
    assert len(got.failures) == 1
    assert "response '1'" in str(got.failures[0])


def test_label_that_json_cannot_hold_is_reported(through):
    with serving(by_length) as (url, received), pytest.raises(RewardError, match="label cannot be sent"):
        run(through(url), [Scripted("2")], asked=prompt(label={1, 2}))
    assert not received
