"""A program started by the fork server behaves like one started by a new interpreter."""

import signal
import subprocess
import sys

import pytest

from tests.warm import kill, warm_python

pytestmark = pytest.mark.slow(seconds=1)
WATCHDOG = 300  # seconds; the first program waits for the server's imports
PROGRAMS = {
    "arguments": ["-c", "import sys; print(sys.argv)", "a b", "-m"],
    "a module": ["-m", "calendar", "2024", "2"],
    "environment": ["-c", "import os; print(os.getcwd(), os.environ['HERE'], input())"],
    "an exit code": ["-c", "import sys; print('out'); sys.exit(7)"],
    "an exit message": ["-c", "raise SystemExit('because')"],
    "an error": ["-c", "import sys; sys.tracebacklimit = 0; 1 / 0"],
    "death by signal": ["-c", "import os; os.kill(os.getpid(), 15)"],
    "handlers at exit": ["-c", "import atexit; atexit.register(print, 'last')"],
    "a thread": ["-c", "import threading; threading.Timer(0.1, print, ['late']).start()"],
}


@pytest.mark.parametrize("argv", PROGRAMS.values(), ids=PROGRAMS)
def test_a_warm_program_behaves_like_a_cold_one(argv, tmp_path):
    def run_with(python):
        environ = {"HERE": "a place", "PYTHONIOENCODING": "utf-8"}
        options = {"cwd": tmp_path, "env": environ, "input": "given\n", "encoding": "utf-8", "timeout": WATCHDOG}
        done = subprocess.run([*python, *argv], capture_output=True, **options)
        return done.returncode, done.stdout, done.stderr

    assert run_with(warm_python()) == run_with([sys.executable])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_program(number):
    waiting = ["-c", "print('up', flush=True); input()"]
    with subprocess.Popen([*warm_python(), *waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"up\n"
        program.send_signal(number)
        assert program.stdout.read() == b""  # the program has ended too
        assert program.wait(WATCHDOG) == -number


def test_a_client_ends_after_its_killed_program(tmp_path):
    forever = "open('file', 'w')\nprint('up', flush=True)\nwhile True: open('file', 'a').write('more')"
    words = [*warm_python(), "-c", forever]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=tmp_path) as program:
        assert program.stdout.readline() == b"up\n"
        kill(program.pid)
        assert program.wait(WATCHDOG) == -signal.SIGKILL
        size = (tmp_path / "file").stat().st_size
        assert program.stdout.read() == b""
        assert (tmp_path / "file").stat().st_size == size
