"""Setup of the whole suite: an environment without the user's settings, and files spread over worker processes.

`tests/` mirrors `openrlhf/`: a test is in the folder of its subject, and its file is named after the module or the
behaviour. File names are unique across folders, because pytest imports test files by their base name. Helpers are
imported from the `tests` package: `tiny` (models and tokenizers), `toy_data` (datasets), `commands` (run a command,
read its files), `rl/toy_task` (an RL task), `plain_transformers` (independent numbers), `warm` (start processes
quickly).
"""

import os
import resource
import shutil
import signal
import sys
import tempfile
from contextlib import contextmanager

import pytest

GIB_PER_WORKER = 6  # the largest test runs Ray, two vLLM engines and two DeepSpeed ranks
MOST_WORKERS = 4  # the longest file takes a quarter of the time
SETTINGS = ("RAY_", "WANDB_", "VLLM_", "OPENRLHF_", "SLURM_", "TORCHELASTIC_")  # prefixes of variables that change runs
ON_REQUEST = ("matrix", "nightly")  # marks of tests that run only if -m names them
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# A shell starts background jobs with SIGINT ignored, and children inherit that; some tests send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

for name in [name for name in os.environ if name.startswith(SETTINGS) or name in LAUNCHER]:
    del os.environ[name]

# Some machines forbid Python to cache compiled modules; then each of the hundreds of processes compiles them again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# By default Ray keeps the address of its last cluster in a folder shared by all users of a machine. Each process of the
# suite gets its own folder, with a short path, because the path of a socket has at most 107 bytes.
os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="or", dir="/tmp")
os.environ |= {"RAY_prestart_worker_first_driver": "0"}  # no idle process per core

# Set by the first process of the suite and inherited by the others: the fork server of tests.warm ends with it.
if "WARM_OWNER" not in os.environ:
    os.environ |= {"WARM_OWNER": str(os.getpid()), "WARM_FOLDER": tempfile.mkdtemp(prefix="or", dir="/tmp")}


def pytest_unconfigure():
    shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
    if os.environ["WARM_OWNER"] == str(os.getpid()):
        shutil.rmtree(os.environ["WARM_FOLDER"], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)  # unknown without xdist (-p no:xdist)
def pytest_xdist_auto_num_workers():
    """Use one worker per core plus one, since some tests wait; fewer if memory is short."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    return max(1, min(len(os.sched_getaffinity(0)) + 1, memory // GIB_PER_WORKER, MOST_WORKERS))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Compute on one thread: tensors this small are slower on several. Light tests do not import torch."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 1
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Run the longest files first, so that workers finish together; a file takes the sum of its slow marks.

    Tests marked with one of ON_REQUEST take long, so they run only if `-m` names the mark.
    """
    hidden = [mark for mark in ON_REQUEST if mark not in config.option.markexpr]
    left_out = [item for item in items if any(map(item.get_closest_marker, hidden))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    seconds = {}
    for item in items:
        for mark in item.iter_markers("slow"):
            seconds[item.path] = seconds.get(item.path, 0) + mark.kwargs["seconds"]
    items.sort(key=lambda item: -seconds.get(item.path, 0))


@pytest.fixture
def file_size_limit():
    """Return a context in which no file can grow beyond a size: like a full disk, but without root."""

    @contextmanager
    def limit(size):
        before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))

    return limit
