"""Liger patches every kind of model. Its kernels need a GPU, so these tests only check which modules are patched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openrlhf.config.sections.model import LoadingFlags, ModelFlags
from openrlhf.models.liger import uses_liger
from tests.tiny import make_model

ROOT = Path(__file__).parents[2]
# In a separate process: Liger replaces rotary embeddings for all models of a family in the process.
LOAD = """
import json, sys
import torch
from openrlhf.config.sections.model import ModelFlags
from openrlhf.models.load import load_causal_lm, load_scalar_model

def fused(model):
    return sum("Liger" in module.forward.__qualname__ for module in model.modules())

flags, cuda, found = ModelFlags(use_liger_kernel=True), torch.device("cuda"), {}
for kind in sys.argv[1:]:
    policy = load_causal_lm(f"./{kind}", flags, device=cuda, packing=True)
    critic = load_scalar_model(f"./{kind}", flags, device=cuda, packing=True, head_prefix="score", new_head=True)
    found[kind] = [fused(policy), fused(critic)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("liger")
    kinds = ["llama", "qwen3", "gpt2", "gemma3"]
    for kind in kinds:
        make_model(folder / kind, kind)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-c", LOAD, *kinds]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow(seconds=13)
def test_norms_and_mlps_are_fused_under_either_head(loaded):
    found, _ = loaded
    assert found["llama"] == [7, 7]  # two layers: two norms and an MLP each, and the last norm
    assert found["qwen3"] == [11, 11]  # norms of queries and keys as well


@pytest.mark.slow(seconds=0)
def test_a_family_that_liger_does_not_support_is_unchanged(loaded):
    found, said = loaded
    assert found["gpt2"] == [0, 0]
    assert found["gemma3"][0] > 0
    assert "--use_liger_kernel cannot patch a Gemma3TextForSequenceClassification, so it runs without Liger" in said


def test_liger_is_not_used_on_cpus_or_for_served_models():
    asked, cpu, cuda = ModelFlags(use_liger_kernel=True), torch.device("cpu"), torch.device("cuda")
    assert not uses_liger(asked, "llama", cpu)
    assert not uses_liger(ModelFlags(), "llama", cuda)
    assert not uses_liger(LoadingFlags(), "llama", cuda)
