"""The commands. With `python -m` they hear Ctrl-C and SIGTERM from here on, before anything else is imported."""

import sys

from openrlhf.cli.signals import end_at_once

if sys.argv[0] == "-m":  # so it reads while Python looks for the module to run, and imports the packages around it
    end_at_once()
