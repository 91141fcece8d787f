"""The commands of the package, one module each.

Under `python -m openrlhf.cli.<command>`, this file installs the signal handlers, so that Ctrl-C and SIGTERM work before
slow modules are imported.
"""

import sys
from itertools import pairwise

from openrlhf.signals import exit_on_signals

# While Python locates the module to run and imports its parent packages, argv[0] is "-m".
if sys.argv[0] == "-m" and any(a == "-m" and b.startswith("openrlhf.cli.") for a, b in pairwise(sys.orig_argv)):
    exit_on_signals()
