"""Records which flags the code behind the config reads while a command runs."""

import dataclasses
import sys
from contextlib import contextmanager

from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flags_of

THROUGH = ("openrlhf.config.sections", "openrlhf.config.runtime", __name__)  # derived values: their caller reads
SILENT = ("openrlhf.config", "openrlhf.training.flag_record")  # parse, check, show and write down


def section_types():
    kinds = {
        type(getattr(command(), part.name)) for command in COMMANDS.values() for part in dataclasses.fields(command)
    }
    return {base for kind in kinds for base in kind.__mro__ if dataclasses.is_dataclass(base)}


@contextmanager
def recorded_reads():
    """Yields a set that fills up with the names of the flags that are read to do something with them."""
    names = {name for command in COMMANDS.values() for name in flags_of(command)}
    read = set()

    def recording(self, name):
        if name in names and name not in read and reader_acts(sys._getframe(1)):
            read.add(name)
        return object.__getattribute__(self, name)

    kinds = section_types()
    for kind in kinds:
        kind.__getattribute__ = recording
    try:
        yield read
    finally:
        for kind in kinds:
            del kind.__getattribute__


def reader_acts(frame):
    """True when the code that asked belongs to the package and is more than a list of flags."""
    while frame is not None and within(frame, THROUGH):
        frame = frame.f_back
    return frame is not None and within(frame, ("openrlhf",)) and not within(frame, SILENT)


def within(frame, packages):
    module = frame.f_globals.get("__name__", "")
    generated = frame.f_code.co_filename == "<string>"  # a dataclass's own comparison or hash
    return not generated and any(module == package or module.startswith(f"{package}.") for package in packages)
