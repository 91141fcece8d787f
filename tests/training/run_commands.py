"""Run several commands in one process, which a launcher started: FILE holds [[name, argv], ...] as JSON."""

import json
import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    for name, argv in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        import_module(f"openrlhf.cli.{name}").main(argv)
