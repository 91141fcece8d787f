"""Shapes and workloads for plans."""

import shlex

import pytest

from openrlhf.config.check import check_sizes
from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse
from openrlhf.config.workload import workload_of
from openrlhf.plan.assessment import assess
from openrlhf.plan.gpus import GPUS, Machine
from openrlhf.plan.shapes import shape_of
from tools.scale_page import SHAPES

SMALL, LARGE = "Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.1-70B"


@pytest.fixture(scope="session")
def shapes():
    return {
        (name, scalar): shape_of(SHAPES[name], scalar=scalar) for name in (SMALL, LARGE) for scalar in (False, True)
    }


@pytest.fixture
def plan(shapes):
    """Return a function that plans a command line on a machine."""

    def make(command, machine=None):
        machine = machine or Machine(GPUS["H200"])
        name, *argv = shlex.split(command)
        config = check_sizes(parse(COMMANDS[name], argv, environ={}), lambda line: None)
        return assess(workload_of(config, machine.devices), machine, shapes)

    return make


def sizes(terms):
    """Return the bytes of each kind, over all roles."""
    found = {}
    for term in terms:
        found[term.kind] = found.get(term.kind, 0) + term.size
    return found
