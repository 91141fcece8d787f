"""Programs written by a model, in the sandbox: each test is an attack, on the isolation that this machine offers.

On a machine that offers none, `run_program` must refuse; `attack` checks that instead.
"""

import errno
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from sessions import WATCHDOG

from openrlhf.agents.sandbox import program
from openrlhf.agents.sandbox.control_group import ControlGroup, remove_abandoned
from openrlhf.agents.sandbox.program import ProgramLimits, close_servers, run_program
from openrlhf.agents.sandbox.server_handle import ForkServer, StartError
from openrlhf.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMALL = ProgramLimits(seconds=WATCHDOG, memory=256 << 20, processes=8, output=4096, file_size=1 << 20, disk=4 << 20)


@cache
def find_failure(isolation):
    """Return why programs cannot be isolated this way on this machine; "" if they can."""
    try:
        ForkServer(isolation, SMALL.disk).close()
    except StartError as error:
        failure = str(error)
    else:
        return ""
    permitted = subprocess.run(["unshare", "--user", "--map-root-user", "--net", "true"], check=False).returncode == 0
    assert not permitted, f"this machine permits namespaces, but the sandbox does not start: {failure}"
    return failure


@pytest.fixture(params=["namespaces", "bubblewrap"] if shutil.which("bwrap") else ["namespaces"])
def attack(request, monkeypatch):
    """Return a function that runs a program with one kind of isolation.

    A machine that forbids it must refuse; the test then ends, because nothing runs that could be attacked.
    """
    isolation, failure = request.param, find_failure(request.param)
    servers = program._Servers()
    monkeypatch.setattr(program, "_servers", servers)
    servers.isolation, servers.failures = ("none", {isolation: failure}) if failure else (isolation, {})

    def run(source, limits=SMALL, **given):
        if failure:
            with pytest.raises(ConfigError, match=r"cannot be isolated.*OPENRLHF_UNISOLATED_PROGRAMS=1"):
                run_program("pass", allow_unisolated=False)
            pytest.xfail(f"refused, as it must be: {failure}")
        return run_program(source and textwrap.dedent(source), limits=limits, **given)

    yield run
    close_servers()


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A folder of the trainer with a secret, and a secret in its environment."""
    monkeypatch.setenv("SECRET_KEY", "sk-1234567")
    (tmp_path / "secret").write_text("sk-1234567")
    return tmp_path


def alive(marker):
    """Return the processes of this machine with a word in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_program_runs_with_input_files_and_libraries(attack):
    source = """
        import sys, json, unittest
        from helper import double
        print(double(int(sys.stdin.read())), __name__, open("data/table.txt").read())
        print("careful", file=sys.stderr)
        sys.exit(3)
    """
    files = {"helper.py": "def double(x): return 2 * x", "data/table.txt": b"\xe2\x82\xac"}
    result = attack(source, stdin="21", files=files)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "42 __main__ €\n", "careful\n")
    assert result.limit is None


def test_command_runs(attack):
    result = attack(None, argv=["sh", "-c", "cat; echo $HOME; exit 4"], stdin="hello ")
    assert (result.exit_code, result.stdout) == (4, "hello /tmp\n") or result.stdout.startswith("hello /tmp/")
    assert attack(None, argv=["no-such-program"]).exit_code == 127


def test_exceptions_and_signals_are_reported(attack):
    result = attack("def f():\n    return 1 / 0\nf()")
    assert result.exit_code == 1
    assert 'program.py", line 2, in f\n    return 1 / 0' in result.stderr
    assert "fork_server" not in result.stderr
    assert attack("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").exit_code == -11
    assert attack("this is not Python").exit_code == 1


def test_threads_and_exit_functions_finish(attack):
    source = """
        import atexit, threading
        atexit.register(lambda: print("exit"))
        threading.Timer(0.01, lambda: print("thread")).start()
    """
    assert attack(source).stdout == "thread\nexit\n"


def test_a_run_leaves_nothing_for_the_next(attack):
    first = """
        import builtins, math, os
        builtins.len = math.pi = None
        open("/tmp/left", "w").close()
        os.environ["LEFT"] = "1"
    """
    assert attack(first).exit_code == 0
    second = "import math, os; print('left' in os.listdir('/tmp'), math.pi > 3, 'LEFT' in os.environ)"
    assert attack(second).stdout == "False True False\n"


def test_fork_bomb(attack):
    source = """
        import os, time
        children = 0
        while True:
            try:
                if os.fork() == 0:
                    while True:
                        try:
                            os.fork()
                        except OSError:
                            time.sleep(0.01)
                children += 1
            except OSError as error:
                print(children, error.errno, flush=True)
                break
    """
    result = attack(source)
    assert result.exit_code == 0
    children, error = map(int, result.stdout.split())
    assert children <= SMALL.processes
    assert error == 11  # EAGAIN


def test_memory_bomb(attack):
    assert "MemoryError" in attack("x = bytearray(1 << 30)").stderr


def test_memory_bomb_of_many_processes(attack):
    """Each process is below the limit; only control groups can count them together."""
    source = """
        import os, time
        for _ in range(6):
            if os.fork() == 0:
                x = bytearray(b"x" * (100 << 20))
                time.sleep(3600)
        for _ in range(6):
            os.wait()  # the kernel kills children until the rest fit
            print("killed", flush=True)
            os._exit(0)
    """
    result = attack(source, ProgramLimits(seconds=20, memory=256 << 20))
    if ControlGroup.create() is None:  # documented: the limit then applies to each process
        assert result.limit == "seconds"
    else:
        assert result.limit == "memory"


def test_out_of_memory_the_kernel_kills_the_program_first(attack):
    # Without control groups, and with a low score, the kernel would kill the largest process: the trainer.
    ran = attack(
        """
        import os
        score = "/proc/self/oom_score_adj"
        try:
            with open(score, "w") as file:
                file.write("0")
        except OSError as error:
            print(error.strerror)
        print(open(score).read() if os.path.exists(score) else 1000)
        """
    )
    assert ran.stdout.split()[-1:] == ["1000"], ran


def test_memory_that_counts_towards_no_process(attack):
    ran = attack(
        """
        import ctypes
        libc = ctypes.CDLL(None)
        print(libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600), libc.msgget(0, 0o1600), libc.memfd_create(b"x", 0))
        """
    )
    assert ran.stdout == "-1 -1 -1\n", ran


def test_a_limit_is_set_when_the_memory_of_a_killed_program_is_free(tmp_path, monkeypatch):
    """In version 1, the kernel refuses a limit below the memory in use, which it frees a moment after a kill."""
    tries, write = [], Path.write_text

    def refuse_twice(path, text):
        tries.append(path.name)
        if tries.count("memory.limit_in_bytes") in (1, 2):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return write(path, text)

    for name in ("memory.limit_in_bytes", "pids.max"):
        (tmp_path / name).touch()
    monkeypatch.setattr(Path, "write_text", refuse_twice)
    ControlGroup(tmp_path, tmp_path).limit(memory=1 << 20, processes=4)
    assert (tmp_path / "memory.limit_in_bytes").read_text() == str(1 << 20)
    assert tries == ["pids.max", *["memory.limit_in_bytes"] * 3]


def test_a_server_whose_limits_cannot_be_set_is_replaced(attack, monkeypatch):
    assert attack("print(1)").stdout == "1\n"
    idle = program._servers.idle[:]
    if not idle or idle[0].group is None:
        pytest.skip("no server with a control group is left for a second program")
    limit = ControlGroup.limit

    def refuse(group, memory, processes):
        if group is idle[0].group:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        limit(group, memory, processes)

    monkeypatch.setattr(ControlGroup, "limit", refuse)
    assert attack("print(2)").stdout == "2\n"
    assert idle[0].process.returncode is not None
    assert not idle[0].group.memory.exists()


def test_network(attack):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        source = f"""
            import socket
            for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_INET, ("1.1.1.1", 53)),
                                    (socket.AF_UNIX, "\\0openrlhf-test-{port}")):
                try:
                    socket.socket(family).connect(address)
                    print("connected")
                except OSError as error:
                    print("refused")
            for family in (40, 16, 17):  # vsock, netlink, packet
                try:
                    socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_STREAM)
                    print("opened")
                except OSError:
                    print("refused")
        """
        with socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind(f"\0openrlhf-test-{port}")
            abstract.listen()
            assert attack(source).stdout.split() == ["refused"] * 6


def test_write_outside(attack, outside):
    source = f"""
        import os, sys
        python = sys.prefix, os.path.dirname(os.__file__)
        for path in ({str(outside)!r}, "/", "/usr", "/etc", "/dev", "/proc/sys/kernel", *python):
            try:
                open(path + "/written", "w").close()
                print(path)
            except OSError:
                pass
        open("inside", "w").close()
    """
    result = attack(source)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert not (outside / "written").exists()


def test_reading_the_trainer(attack, outside):
    """Nothing of the trainer is visible: neither its files, nor its processes, nor its environment."""
    source = f"""
        import glob, os
        for path in [{str(outside / "secret")!r}, *glob.glob("/proc/*/environ"), *glob.glob("/proc/*/cmdline"),
                     *glob.glob("/proc/*/task/*/environ"), "/etc/shadow", "/proc/1/mem", "/proc/1/maps"]:
            try:
                text = open(path, "rb").read()
                print(path, b"sk-1234567" in text, b"pytest" in text)
            except OSError:
                pass
        print(os.path.exists({str(ROOT / "pyproject.toml")!r}), os.path.exists("/home"), "SECRET_KEY" in os.environ)
        print({os.getpid()} in map(int, filter(str.isdecimal, os.listdir("/proc"))) if {os.getpid()} > 100 else False)
        try:
            os.kill({os.getpid()}, 0)
            print("found" if {os.getpid()} > 100 else "own")
        except OSError:
            pass
    """
    result = attack(source)
    assert result.exit_code == 0, result.stderr
    assert "True" not in result.stdout
    assert "found" not in result.stdout


def test_the_memory_of_a_program_holds_no_secret(attack, outside):
    """No secret of the trainer or of an earlier program, whose text and output passed through the server."""
    source = """
        import gc, os, re
        secret = re.compile(rb"sk-1234[5]67|SECRET[_]KEY")  # matches neither itself nor this source
        found = sum(len(secret.findall(str(kept).encode())) for kept in gc.get_objects() if isinstance(kept, dict))
        for line in open("/proc/self/maps") if os.path.exists("/proc/self/maps") else ():
            area, rights = line.split()[:2]
            start, end = (int(part, 16) for part in area.split("-"))
            if rights.startswith("r") and "[v" not in line:
                with open("/proc/self/mem", "rb") as memory:
                    memory.seek(start)
                    part = memory.read(end - start)
                    found += len(secret.findall(part))
        print(found)
    """
    for _ in range(2):  # the second time, in memory that an earlier program used
        assert attack(source).stdout == "0\n"
        assert attack("print('sk-1234567', input())", stdin="SECRET_KEY").stdout == "sk-1234567 SECRET_KEY\n"


def test_daemonised_child(attack):
    marker = f"openrlhf-daemon-{os.getpid()}"
    source = f"""
        import os, sys, time
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.close(1)
                os.write(write, b"1")
                os.execvp(sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)", "{marker}"])
            os._exit(0)
        os.read(read, 1)
        print("done")
    """
    assert attack(source).stdout == "done\n"
    deadline = time.monotonic() + 30
    while alive(marker.encode()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive(marker.encode()) == []


def test_a_program_that_resists_is_killed(attack):
    source = """
        import os, signal, sys
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        print("ready", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        while True: pass
    """
    result = attack(source, ProgramLimits(seconds=1))
    assert (result.stdout, result.limit, result.exit_code) == ("ready\n", "seconds", -9)
    assert 1 <= result.seconds < WATCHDOG


def test_processor_time(attack):
    result = attack("while True: pass", ProgramLimits(seconds=WATCHDOG, cpu_seconds=1))
    assert (result.limit, result.exit_code) == ("cpu_seconds", -24)


def test_endless_output(attack):
    for stream in ("stdout", "stderr"):
        result = attack(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
        assert result.limit == "output"
        assert getattr(result, stream) == "x" * SMALL.output


def test_disk(attack):
    source = """
        import os
        total = 0
        try:
            for number in range(100):
                with open(f"file{number}", "wb", buffering=0) as file:
                    total += file.write(bytes(1 << 19))
        except OSError as error:
            print(error.errno)
        print(total)
        try:
            print(open("big", "wb", buffering=0).write(bytes(2 << 20)))
        except OSError as error:
            print(error.errno)
    """
    result = attack(source)
    first, total, big = result.stdout.split()
    assert first == "28"  # no space left
    assert int(total) <= SMALL.disk
    assert big in ("28", "27") or int(big) <= SMALL.file_size


@pytest.mark.parametrize("attack", ["namespaces"], indirect=True)  # bubblewrap has no option for it
def test_many_small_files(attack):
    source = """
        count = 0
        try:
            for count in range(1_000_000):
                open(f"file{count}", "x").close()
        except OSError as error:
            print(error.errno, count)
    """
    result = attack(source, ProgramLimits(seconds=WATCHDOG, disk=1 << 20))
    error, count = map(int, result.stdout.split())
    assert error == 28
    assert count < 1_000_000


def test_inherited_descriptors(attack, outside):
    with open(outside / "secret") as file:
        os.set_inheritable(file.fileno(), True)
        source = """
            import os
            for number in range(3, 256):
                try:
                    print(number, os.read(number, 10))
                except OSError:
                    pass
        """
        assert attack(source).stdout == ""


def test_privileges(attack):
    """No capability, no way back to one, and none of the system calls that are common ways out."""
    source = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        calls = {
            "unshare": lambda: libc.unshare(0x10000000),
            "mount": lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None),
            "ptrace": lambda: libc.ptrace(16, 1, 0, 0),
            "setuid": lambda: libc.setuid(0) if os.getuid() else -1,
            "chroot": lambda: libc.chroot(b"/tmp"),
            "mknod": lambda: libc.mknod(b"disk", 0o60600, 0xFE00),
            "sethostname": lambda: libc.sethostname(b"x", 1),
            "umount": lambda: libc.umount2(b"/proc", 2),
        }
        for name, call in calls.items():
            if call() != -1:
                print(name)
        if os.path.exists("/proc/self/status"):
            for line in open("/proc/self/status"):
                if line.startswith("Cap") and int(line.split()[1], 16) or line == "NoNewPrivs:\\t0\\n":
                    print(line)
    """
    result = attack(source)
    assert (result.exit_code, result.stdout) == (0, "")


def test_killing_everything_ends_only_the_run(attack):
    """A program that kills every process it can reach, and closes its descriptors, does not disturb the next one."""
    source = """
        import os, signal
        os.closerange(0, 256)
        for number in (-1, 1, os.getppid()):
            try:
                os.kill(number, signal.SIGKILL)
            except OSError:
                pass
        os._exit(5)
    """
    result = attack(source)
    assert result.exit_code in (5, -9)
    assert attack("print(1)").stdout == "1\n"


def test_programs_run_at_the_same_time(attack):
    attack("pass")
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda number: attack(f"print({number} ** 2)"), range(12)))
    assert [int(result.stdout) for result in results] == [number**2 for number in range(12)]


def test_servers_end_with_their_owner(tmp_path):
    """A killed trainer leaves no server, no program and no control group."""
    marker = f"openrlhf-owner-{os.getpid()}"
    source = f"""
        import os
        os.environ["OPENRLHF_UNISOLATED_PROGRAMS"] = "1"
        from openrlhf.agents.sandbox.program import ProgramLimits, run_program
        run_program("pass")
        run_program(argv=["sh", "-c", "sleep 3600; : {marker}"], limits=ProgramLimits(seconds=3600))
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], cwd=ROOT)
    started = time.monotonic()
    while len(alive(marker.encode())) < 2:  # the owner itself, and the program
        assert time.monotonic() - started < WATCHDOG
        time.sleep(0.01)
    owner.kill()
    owner.wait()
    while alive(marker.encode()):
        assert time.monotonic() - started < WATCHDOG
        time.sleep(0.01)
    group = ControlGroup.create()
    if group is not None:
        while list(group.pids.parent.glob(f"openrlhf-program-{owner.pid}-*")):
            remove_abandoned(group.pids.parent)  # as the next start does; killed processes take a moment to leave
            assert time.monotonic() - started < WATCHDOG
        remove_abandoned(group.memory.parent)
        group.remove()


OTHER_USER = """
import os, sys
sys.path.insert(0, {root!r})
from openrlhf.agents.sandbox import linux
if len(sys.argv) == 1:  # become a user without privileges in a user namespace, as on a laptop
    user, group = os.getuid(), os.getgid()
    linux.unshare(linux.NEW_USER)
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write(f"1234 {{user}} 1")
    open("/proc/self/gid_map", "w").write(f"1234 {{group}} 1")
    os.execv(sys.executable, [sys.executable, {file!r}, "again"])
from openrlhf.agents.sandbox import program
result = program.run_program("import os; print(os.getuid(), os.path.exists({root!r} + '/pyproject.toml'))")
print(program._servers.isolation, result.stdout or result.stderr)
"""


def test_an_unprivileged_user_needs_no_other_user(tmp_path):
    """Without the right to map a second user, programs run as the user itself, in the user's namespace."""
    file = tmp_path / "other_user.py"
    file.write_text(OTHER_USER.format(root=str(ROOT), file=str(file)))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=WATCHDOG)
    if find_failure("namespaces"):
        assert "unshare" in done.stderr or "cannot be isolated" in done.stderr
    else:
        assert done.stdout.startswith("namespaces 1234 False\n"), done.stderr


BELOW_TMP = """
import sys
sys.path.insert(0, {root!r})
from openrlhf.agents.sandbox import program
source = "import os, sys, textwrap, sqlite3; open('/tmp/mine', 'w'); print(sys.prefix, sorted(os.listdir('/tmp')))"
result = program.run_program(source)
print(program._servers.isolation, result.stdout or result.stderr)
"""


def test_an_environment_below_tmp_stays_visible():
    """Programs have their own /tmp, but import libraries from an environment below the machine's."""
    if find_failure("namespaces"):
        return
    with tempfile.TemporaryDirectory(prefix="or", dir="/tmp") as folder:
        environment, file = Path(folder, "an environment"), Path(folder, "run.py")
        environment.symlink_to(sys.prefix)
        file.write_text(BELOW_TMP.format(root=str(ROOT)))
        python = environment / Path(sys.executable).relative_to(sys.prefix)
        done = subprocess.run([python, file], capture_output=True, text=True, timeout=WATCHDOG)
        assert done.stdout == f"namespaces {environment} ['mine', '{Path(folder).name}', 'program.py']\n\n", done.stderr


# Without isolation --------------------------------------------------------------------------------------------------

NO_NAMESPACES = """
import os, sys
sys.path.insert(0, {root!r})
sys.path.insert(0, {tests!r})
from openrlhf.agents.sandbox import linux
try:  # forbid further user namespaces, as many containers do
    user, group = os.getuid(), os.getgid()
    linux.unshare(linux.NEW_USER)
    open("/proc/self/setgroups", "w").write("deny")
    open("/proc/self/uid_map", "w").write(f"0 {{user}} 1")
    open("/proc/self/gid_map", "w").write(f"0 {{group}} 1")
    open("/proc/sys/user/max_user_namespaces", "w").write("0")
except OSError:
    pass  # they are forbidden already
from openrlhf.agents.sandbox.program import *
{source}
"""


def run_without_namespaces(source, **environment):
    text = NO_NAMESPACES.format(root=str(ROOT), tests=str(Path(__file__).parent), source=textwrap.dedent(source))
    kept = {name: value for name, value in os.environ.items() if name != "OPENRLHF_UNISOLATED_PROGRAMS"}
    return subprocess.run(
        [sys.executable, "-c", text], env=kept | environment, capture_output=True, text=True, timeout=WATCHDOG
    )


def test_without_isolation_programs_are_refused():
    done = run_without_namespaces("run_program('print(1)')")
    line = done.stderr.strip().splitlines()[-1]
    pattern = (
        r"openrlhf.errors.ConfigError: programs cannot be isolated on this machine: expected user namespaces or "
        r"bubblewrap, got namespaces: .+; bubblewrap: .+\. Try: .*OPENRLHF_UNISOLATED_PROGRAMS=1 .*=True"
    )
    assert re.match(pattern, line), done.stderr
    assert done.stdout == ""


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("environment", [{"OPENRLHF_UNISOLATED_PROGRAMS": "1"}, {}])
def test_opt_in_keeps_the_limits(environment, tmp_path):
    """Without isolation: limits, output, and the end of daemons still work."""
    marker = f"openrlhf-opted-{os.getpid()}"
    given = "" if environment else "allow_unisolated=True, "
    source = f"""
        limits = ProgramLimits(seconds=1, memory=256 << 20, output=1000)
        daemon = '''
        import os, subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", "{marker}"], start_new_session=True)
        print(os.getcwd())
        '''
        programs = ["print(input())", "x = bytearray(1 << 30)", "while True: pass", "while True: print('x' * 99)",
                    "import time; time.sleep(9999)", __import__("textwrap").dedent(daemon)]
        for source in programs:
            result = run_program(source, {given}stdin="hello", limits=limits)
            print(result.exit_code, result.limit, len(result.stdout), result.stderr.strip().splitlines()[-1:])
        print(__import__("os").path.exists(result.stdout.strip()))
    """
    done = run_without_namespaces(source, **environment)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["0 None 6 []", "1 None 0 ['MemoryError']"], done.stderr
    assert lines[2:5] == ["-9 seconds 0 []", "-9 output 1000 []", "-9 seconds 0 []"]
    assert lines[5].startswith("0 None ")
    assert lines[6] == "False"
    assert alive(marker.encode()) == []


# Arguments ----------------------------------------------------------------------------------------------------------


def test_wrong_arguments():
    with pytest.raises(ValueError, match="either Python source or argv"):
        run_program()
    with pytest.raises(ValueError, match=r"expected a relative path, got '\.\./x'"):
        run_program("pass", files={"../x": ""})
    with pytest.raises(ValueError, match="expected a relative path, got '/x'"):
        run_program("pass", files={"/x": ""})
    with pytest.raises(ValueError, match=r"do not fit: expected at most 10 bytes \(limits.disk\)"):
        run_program("pass", files={"x": "x" * 20}, limits=ProgramLimits(disk=10))
