"""The variables that vLLM reads when it starts."""

import os
import tempfile

import pytest

from openrlhf.rollout.vllm import set_environment


@pytest.mark.parametrize(("length", "folder"), [(60, None), (80, "/tmp")])
def test_sockets_fit_in_long_temporary_folders(length, folder, monkeypatch):
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "RPC" not in name})
    monkeypatch.setattr(tempfile, "tempdir", "/" + length * "x")
    set_environment()
    assert os.environ.get("VLLM_RPC_BASE_PATH") == folder
