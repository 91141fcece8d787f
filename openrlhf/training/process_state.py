"""State of the process that a run changes, restored for Python callers that continue after it.

A command ends with its run, so it may set variables and library settings for the whole process. A notebook may start
several runs. Folder locks, engines and worker processes are not handled here: the run itself closes them, even after an
error.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from transformers.utils import logging


@contextmanager
def process_state_restored() -> Iterator[None]:
    """On exit, restore the environment and the settings of libraries, and free the memory of the run's models."""
    environment = dict(os.environ)
    deterministic, shows_bars = torch.are_deterministic_algorithms_enabled(), logging.is_progress_bar_enabled()
    hub_shows_bars = not are_progress_bars_disabled()
    try:
        yield
    finally:
        for variable in os.environ.keys() - environment.keys():
            del os.environ[variable]
        os.environ.update(environment)
        torch.use_deterministic_algorithms(deterministic)
        if shows_bars:
            logging.enable_progress_bar()
        if hub_shows_bars:
            enable_progress_bars()
        gc.unfreeze()  # an error may have kept `present_objects_frozen` from doing so
        gc.collect()  # models may be in reference cycles
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@contextmanager
def present_objects_frozen() -> Iterator[None]:
    """Exclude all present objects from garbage collection.

    A collection over the objects of all imported modules would interrupt a training step or a request for 0.3 s.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()  # Python does not free frozen objects at exit, and extension modules would report them as leaked
