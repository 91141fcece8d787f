"""Record which flags are read while a command runs.

The dataclasses of the config get a `__getattribute__` that looks at the calling frame: a read counts if code of the
package outside the config uses the value, and does not count if the config only parses, checks or prints it.
"""

import dataclasses
import sys
from contextlib import contextmanager

from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flags_of

THROUGH = (
    "openrlhf.config.sections",
    "openrlhf.config.runtime",
    __name__,
)  # derived values: the read belongs to their caller
NOT_USES = ("openrlhf.config",)  # it only parses, checks, prints and records flags


def section_types():
    kinds = {
        type(getattr(command(), part.name)) for command in COMMANDS.values() for part in dataclasses.fields(command)
    }
    return {base for kind in kinds for base in kind.__mro__ if dataclasses.is_dataclass(base)}


@contextmanager
def recorded_reads():
    """Yield a set that fills with the names of flags whose values are used."""
    names = {name for command in COMMANDS.values() for name in flags_of(command)}
    read = set()

    def record_read(self, name):
        if name in names and name not in read and reader_uses_value(sys._getframe(1)):
            read.add(name)
        return object.__getattribute__(self, name)

    kinds = section_types()
    for kind in kinds:
        kind.__getattribute__ = record_read
    try:
        yield read
    finally:
        for kind in kinds:
            del kind.__getattribute__


def reader_uses_value(frame):
    """True if the reading code belongs to the package and uses the value."""
    while frame is not None and is_within(frame, THROUGH):
        frame = frame.f_back
    return frame is not None and is_within(frame, ("openrlhf",)) and not is_within(frame, NOT_USES)


def is_within(frame, packages):
    module = frame.f_globals.get("__name__", "")
    generated = frame.f_code.co_filename == "<string>"  # the generated comparison or hash of a dataclass
    return not generated and any(module == package or module.startswith(f"{package}.") for package in packages)
