"""Make the scripts of benchmarks/ importable under the names by which they import each other."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
