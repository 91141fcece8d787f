"""Start programs warm although a launcher, Ray or a shell script starts them.

Python imports `sitecustomize` at startup if it is on the path. `tests.warm.warm_children()` puts this folder there
and sets WARM_PYTHON to the socket of the fork server. If the program is one of those below, this process becomes a
client of the server and never returns from `run`; every other program starts as usual.
"""

import os
import sys

MODULES = ("openrlhf.cli.", "deepspeed.launcher.launch")
CODE = "openrlhf.rollout.engine_server"  # in programs of the form -c CODE
FILES = ("default_worker.py", "ray_drivers.py", "bin/deepspeed", "bin/torchrun")

if "WARM_PYTHON" in os.environ:
    words = sys.orig_argv[1:]
    words = words[words[:1] == ["-u"] :]
    match words:
        case ["-m", module, *_] if module.startswith(MODULES):
            warm = True
        case ["-c", code, *_]:
            warm = CODE in code
        case [file, *_]:
            warm = file.endswith(FILES)
        case _:
            warm = False
    if warm:
        from tests.fork_server import run

        run(os.environ["WARM_PYTHON"], words)
