"""How many engines share a GPU, and how they share a CPU."""

from dataclasses import replace

import pytest
import torch

from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse
from openrlhf.rl import local_engines
from openrlhf.rl.local_engines import RolloutLoad, automatic_count, cpu_share, engines_per_gpu, smallest_shareable
from openrlhf.rollout.mps import Clients
from tests.commands import as_argv
from tests.rl.toy_task import SMALL, make_prompts, task_flags

GIB = 1 << 30
W1 = RolloutLoad(
    samples=512, weights=3 * GIB, memory=49 * GIB, cores=16
)  # 1.5B parameters, --vllm_gpu_memory_utilization 0.35


@pytest.mark.parametrize(
    ("load", "count"),
    [
        (W1, 2),
        (replace(W1, samples=256), 2),
        (replace(W1, samples=255), 1),
        (replace(W1, weights=12 * GIB), 2),
        (replace(W1, weights=13 * GIB), 1),  # two copies would leave less than half of the memory for caches
        (replace(W1, cores=3), 1),
    ],
)
def test_two_engines_start_if_they_help_and_fit(load, count):
    assert automatic_count(load) == count


@pytest.fixture
def config(tmp_path, models):
    def make(**flags):
        paths = {"pretrain": models(), "save_path": "./out"}
        given = SMALL | task_flags(tmp_path, make_prompts(8)) | paths | {"vllm_num_engines": 1} | flags
        return check(parse(COMMANDS["train_ppo"], as_argv(given), environ={}), lambda line: None)

    return make


@pytest.fixture
def gpu(monkeypatch):
    """Make the machine appear to have a GPU of 80 GiB."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(local_engines, "shareable_memory", lambda: 80 * GIB)
    monkeypatch.setattr(local_engines, "start_mps", Clients)
    monkeypatch.setattr(local_engines.os, "sched_getaffinity", lambda _: range(8))


LARGE = {"rollout_batch_size": 64, "n_samples_per_prompt": 8, "train_batch_size": 512, "vllm_engines_per_gpu": 0}


def test_a_run_on_a_cpu_has_one_engine_unless_more_are_requested(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert engines_per_gpu(config(**LARGE)) == 1
    assert engines_per_gpu(config(vllm_engines_per_gpu=3)) == 3


@pytest.mark.usefixtures("gpu")
def test_the_automatic_choice_is_announced(config, capsys):
    assert engines_per_gpu(config()) == 1
    assert engines_per_gpu(config(**LARGE | {"vllm_engines_per_gpu": 1})) == 1
    assert engines_per_gpu(config(**LARGE, device="cpu")) == 1
    assert capsys.readouterr().err == ""
    assert engines_per_gpu(config(**LARGE)) == 2
    assert "2 vLLM engines share the GPU" in capsys.readouterr().err


@pytest.mark.usefixtures("gpu")
def test_one_engine_starts_without_mps_and_in_deterministic_runs(config, monkeypatch):
    assert engines_per_gpu(config(**LARGE, full_determinism=True)) == 1
    monkeypatch.setattr(local_engines, "start_mps", lambda: Clients(problem="not installed"))
    assert engines_per_gpu(config(**LARGE)) == 1


@pytest.mark.parametrize(
    ("shown", "mebibytes"),
    [
        ("143771, Default, Disabled\n", 143771),
        ("143771, Default, Disabled\n81559, Default, [N/A]\n", 81559),
        ("143771, Exclusive_Process, Disabled\n", None),
        ("143771, Default, Enabled\n", None),
    ],
)
def test_gpus_that_processes_cannot_share_are_recognised(shown, mebibytes):
    assert smallest_shareable(shown) == (None if mebibytes is None else mebibytes << 20)


@pytest.mark.usefixtures("gpu")
def test_one_engine_starts_if_weights_cannot_be_shared(config, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert engines_per_gpu(config(**LARGE)) == 1


def test_engines_on_a_cpu_share_cores_and_a_given_cache():
    threads = torch.get_num_threads()
    assert cpu_share(2, {}) == {"OMP_NUM_THREADS": str(max(1, threads // 2))}
    assert cpu_share(2, {"VLLM_CPU_KVCACHE_SPACE": "5"})["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert cpu_share(2 * threads, {"VLLM_CPU_KVCACHE_SPACE": "1"}) == {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
