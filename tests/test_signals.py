"""Requests to stop, in this process: it signals itself. Signals during imports are tested with the commands."""

import signal
import threading

import pytest

from openrlhf.signals import SIGNALS, interrupt_on_signals, stop_request


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
