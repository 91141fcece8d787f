"""The commands. With `python -m` they hear Ctrl-C and SIGTERM from here on, before anything else is imported."""

import sys
from itertools import pairwise

from openrlhf.cli.signals import end_at_once

# While Python looks for the module to run, and imports the packages around it, argv[0] reads "-m".
if sys.argv[0] == "-m" and any(a == "-m" and b.startswith("openrlhf.cli.") for a, b in pairwise(sys.orig_argv)):
    end_at_once()
