"""Requests to stop: this process signals itself; programs that hang run as separate processes.

Signals during imports are tested with the commands.
"""

import signal
import subprocess
import sys
import threading
import time

import pytest

from openrlhf.signals import SIGNALS, interrupt_on_signals, stop_request
from tests.commands import DEADLINE, command_environ, is_running


class Halted(KeyboardInterrupt):
    """The error of a caller that does not want to end the program."""


@pytest.fixture(autouse=True)
def same_handlers_afterwards():
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_request_and_a_second_ctrl_c_raises(number, capfd):
    with stop_request("stopping") as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        signal.raise_signal(signal.SIGTERM)  # launchers send it after a Ctrl-C: not a second request
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "stopping\n"


def test_only_the_main_process_prints(capfd, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with stop_request("stopping") as stop:
        signal.raise_signal(signal.SIGTERM)
    assert stop.requested
    assert capfd.readouterr().err == ""


def test_a_request_may_leave_sigterm_to_others_and_raise_an_error_of_its_own():
    with interrupt_on_signals(), stop_request(signals=(signal.SIGINT,), error=Halted) as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Halted):
            signal.raise_signal(signal.SIGINT)


def test_another_thread_installs_no_handler():
    seen = []

    def look():
        with stop_request():
            seen.extend(signal.getsignal(number) for number in SIGNALS)

    before = [signal.getsignal(number) for number in SIGNALS]
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == before


def test_a_later_sigterm_is_a_second_request(monkeypatch):
    monkeypatch.setattr("openrlhf.signals.SAME_REQUEST", -1.0)
    monkeypatch.delenv("RANK", raising=False)
    with stop_request() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_a_launched_process_takes_every_sigterm_as_the_same_request(monkeypatch):
    monkeypatch.setattr("openrlhf.signals.SAME_REQUEST", -1.0)
    monkeypatch.setenv("RANK", "0")
    with stop_request() as stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


PROGRAM = """
import ctypes, os, signal, subprocess, sys, time
from openrlhf import signals
signals.SAME_REQUEST, signals.GRACE_SECONDS = 0.0, 0.2
signals.exit_on_signals()

def lock_twice():
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # never returns, and no Python code runs in this thread

def clean_up_forever():
    try:
        time.sleep(3600)
    finally:
        while True:
            try:
                time.sleep(3600)
            except KeyboardInterrupt:
                pass

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
with signals.interrupt_on_signals(), signals.stop_request("stopping"):
    print(child.pid, flush=True)
    {hang}()
"""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("hang", ["lock_twice", "clean_up_forever"])
def test_a_second_request_ends_a_program_that_hangs(hang, number):
    words = [sys.executable, "-c", PROGRAM.format(hang=hang)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=command_environ()) as program:
        child = int(program.stdout.readline())
        for _ in range(DEADLINE * 5):  # signals in quick succession may be delivered as one
            program.send_signal(number)
            try:
                program.wait(0.2)
                break
            except subprocess.TimeoutExpired:
                continue
        program.kill()
        assert program.wait() == 130
        assert b" 0.2 s after the second signal: killing all processes\n" in program.stderr.read()
    deadline = time.monotonic() + DEADLINE
    while is_running(child):  # a signal takes effect when its process is next scheduled
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_request_ends_a_wait_in_which_nothing_can_be_lost():
    hang = "with signals.end_at_first_signal(): print(flush=True); lock_twice"
    words = [sys.executable, "-c", PROGRAM.format(hang=hang)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=command_environ()) as program:
        for _ in range(2):  # the child's id, then an empty line when the wait begins
            program.stdout.readline()
        program.send_signal(signal.SIGTERM)
        assert program.wait(DEADLINE) == 130
        assert b"openrlhf: interrupted\n" in program.stderr.read()  # the handler may also print its line


NOT_OURS = """
import os, signal, time
from openrlhf import signals
signals.GRACE_SECONDS = 0.0
signals.exit_on_signals()

def ignore(number, frame):
    pass

with signals.interrupt_on_signals(), signals.handled_by(ignore, ends=False):
    for _ in range(3):
        signal.raise_signal(signal.SIGINT)
    time.sleep(0.5)  # for the thread to read them
with signals.interrupt_on_signals(), signals.handled_by(ignore):
    child = os.fork()
    if child == 0:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        os._exit(0)
    os.waitpid(child, 0)
time.sleep(0.5)
print("still there")
"""


def test_signals_that_do_not_ask_this_program_to_end_are_not_counted():
    """Ctrl-C in a chat, and signals of a forked process."""
    done = subprocess.run(
        [sys.executable, "-c", NOT_OURS], capture_output=True, text=True, env=command_environ(), check=False
    )
    assert (done.returncode, done.stdout) == (0, "still there\n"), done.stderr
