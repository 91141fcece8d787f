"""Commands one after the other in a process that a launcher started; FILE holds [[name, argv], ...]."""

import json
import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    for name, argv in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        import_module(f"openrlhf.cli.{name}").main(argv)
