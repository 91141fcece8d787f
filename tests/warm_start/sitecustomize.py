"""Python imports this at its start: programs that would spend most of their time importing start warm instead."""

import os
import sys

MODULES = ("openrlhf.cli.", "deepspeed.launcher.launch")
FILES = ("default_worker.py", "ray_drivers.py", "bin/deepspeed", "bin/torchrun")

if "WARM_PYTHON" in os.environ:
    words = sys.orig_argv[1:]
    words = words[words[:1] == ["-u"] :]
    match words:
        case ["-m", module, *_] if module.startswith(MODULES):
            warm = True
        case [file, *_]:
            warm = file.endswith(FILES)
        case _:
            warm = False
    if warm:
        from tests.fork_server import run

        run(os.environ["WARM_PYTHON"], words)
