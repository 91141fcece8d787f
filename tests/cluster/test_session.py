"""Joining or starting a real Ray, counting its devices and leaving it. Drivers run as processes (ray_drivers.py)."""

import os
import shutil
import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.cluster.ray_machine import COLD, HERE, WATCHDOG, link_interpreter, make_machine, wait_until_gone

pytestmark = pytest.mark.slow(seconds=6)
TOKEN = "0123456789abcdef" * 4
ONE_GROUP = "--advantage_estimator reinforce --init_kl_coef 0"


@pytest.fixture(scope="module")
def two_nodes():
    """A cluster with a token and two nodes, with 2 and 3 devices that count as GPUs; and the variables to join it."""
    made = make_machine()
    with made.start_driver("two_nodes", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as cluster:
        address = cluster.stdout.readline().strip()
        yield made, {"RAY_ADDRESS": address, "RAY_AUTH_TOKEN": TOKEN}
        cluster.stdin.close()
        cluster.wait(WATCHDOG)
    shutil.rmtree(made.folder)


@pytest.fixture
def dead_address():
    with socket.socket() as briefly:
        briefly.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{briefly.getsockname()[1]}"


def test_a_group_spans_its_nodes_and_an_engine_sees_all_its_own_devices(two_nodes):
    machine, environ = two_nodes
    flags = f"{ONE_GROUP} --actor_num_nodes 2 --actor_num_gpus_per_node 1 --vllm_num_engines 1"
    report, _ = machine.run_driver("report_placement", f"{flags} --vllm_tensor_parallel_size 2", **environ)
    ranks, (engine,) = report["groups"]["policy"], report["engines"]
    assert [(one["RANK"], one["WORLD_SIZE"], one["LOCAL_RANK"]) for one in ranks] == [("0", "2", "0"), ("1", "2", "0")]
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in ranks}) == 1
    assert ranks[0]["node"] != ranks[1]["node"]
    assert all(one["node"] == one["assigned_node"] for one in [*ranks, engine])
    assert {one["TORCH_CPP_LOG_LEVEL"] for one in [*ranks, engine]} == {"ERROR"}
    beside = [one["CUDA_VISIBLE_DEVICES"] for one in ranks if one["node"] == engine["node"]]
    assert sorted([*engine["CUDA_VISIBLE_DEVICES"].split(","), *beside]) == ["0", "1", "2"]
    assert Path(engine["package"]).is_relative_to(HERE.parents[1])


def test_an_engine_that_fits_on_no_node_spans_two(two_nodes):
    machine, environ = two_nodes
    flags = f"{ONE_GROUP} --actor_num_gpus_per_node 1 --vllm_num_engines 1 --vllm_tensor_parallel_size 2"
    report, stderr = machine.run_driver("report_placement", f"{flags} --vllm_pipeline_parallel_size 2", **environ)
    first, second = report["engines"]  # one process per node, with the devices of one stage
    assert first["node"] != second["node"]
    assert all(one["node"] == one["assigned_node"] for one in report["engines"])
    (rank,) = report["groups"]["policy"]
    beside = next(one for one in report["engines"] if one["node"] == rank["node"])
    seen = [*beside["CUDA_VISIBLE_DEVICES"].split(","), rank["CUDA_VISIBLE_DEVICES"]]
    assert sorted(seen) == ["0", "1", "2"]
    assert "each engine spans 2 nodes, with 2 devices on each" in stderr
    report, _ = machine.run_driver("find_ports", f"{flags} --vllm_pipeline_parallel_size 2", **environ)
    assert report["port"] > 0
    assert report["lost"] == f"an engine cannot start on its 2 nodes: Ray has lost {report['address']}"
    report, _ = machine.run_driver("report_placement", f"{flags} --vllm_pipeline_parallel_size 4", **environ)
    assert "asks for 9 GPUs (policy 1 x 1, engines 1 x 4 stages x 2)" in report["message"]


def test_ranks_follow_device_order_and_hybrid_engines_share_the_devices(two_nodes):
    machine, environ = two_nodes
    counts = "--actor_num_gpus_per_node 2 --vllm_num_engines 1 --vllm_tensor_parallel_size 2"
    report, _ = machine.run_driver("report_placement", f"{ONE_GROUP} --colocate_all_models {counts}", **environ)
    ranks = [one["CUDA_VISIBLE_DEVICES"] for one in report["groups"]["models"]]
    assert ranks == sorted(ranks)
    assert {one["LOCAL_RANK"] for one in report["groups"]["models"]} == {"0"}  # each sees a single GPU, as device 0
    assert {one["MASTER_ADDR"] for one in report["groups"]["models"]} == {"127.0.0.1"}  # they are all on one node
    assert [one["CUDA_VISIBLE_DEVICES"] for one in report["engines"]] == [",".join(ranks)]


@pytest.mark.parametrize(("inherited", "devices"), [(None, ["0", "1"]), ("4,7", ["4", "7"])])
def test_each_rank_gets_its_ray_device_even_if_ray_sets_no_variable(machine, inherited, devices):
    environ = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    environ |= {"CUDA_VISIBLE_DEVICES": inherited} if inherited else {}
    counts = "--actor_num_gpus_per_node 2 --vllm_num_engines 1 --vllm_tensor_parallel_size 2"
    report, _ = machine.run_driver("two_gpus", f"{ONE_GROUP} --colocate_all_models {counts}", **environ)
    ranks = [(one["CUDA_VISIBLE_DEVICES"], one["LOCAL_RANK"]) for one in report["groups"]["models"]]
    assert ranks == [(device, "0") for device in devices]  # each process sees a single GPU, as device 0
    assert [one["CUDA_VISIBLE_DEVICES"] for one in report["engines"]] == [",".join(devices)]


def test_too_many_devices_are_rejected_and_nothing_stays_reserved(two_nodes):
    machine, environ = two_nodes
    report, _ = machine.run_driver("report_placement", f"{ONE_GROUP} --actor_num_gpus_per_node 4", **environ)
    assert report["error"] == "ConfigError"
    assert "asks for 4 GPUs (policy 1 x 4)" in report["message"]
    assert "2 of 2 free" in report["message"]
    assert "3 of 3 free" in report["message"]


def test_a_folder_that_nodes_do_not_share_is_rejected(two_nodes):
    """/proc/self/cwd is a different folder in each process with another working directory: here, in the workers."""
    machine, environ = two_nodes
    (machine.folder / "elsewhere").mkdir(exist_ok=True)
    flags = f"{ONE_GROUP} --actor_num_nodes 2 --actor_num_gpus_per_node 1 --save_path ./out"
    report, _ = machine.run_driver("report_from_other_folder", f"{flags} --ckpt_path /proc/self/cwd/ckpt", **environ)
    assert report["error"] == "ConfigError"
    assert "--ckpt_path /proc/self/cwd/ckpt is not shared by all nodes" in report["message"]
    assert list((machine.folder / "elsewhere").iterdir()) == []


def test_a_cluster_with_a_token_rejects_a_run_without_it(two_nodes):
    machine, environ = two_nodes
    report, _ = machine.run_driver("report_placement", ONE_GROUP, RAY_ADDRESS=environ["RAY_ADDRESS"])
    assert report["error"] == "ConfigError"
    assert "requires a token" in report["message"]
    assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=" in report["message"]


def test_a_cluster_with_a_token_must_be_named(two_nodes):
    machine, environ = two_nodes
    (machine.folder / "ray").mkdir(exist_ok=True)
    record = machine.folder / "ray" / "ray_current_cluster"
    record.write_text(environ["RAY_ADDRESS"])
    report, _ = machine.run_driver("report_placement", ONE_GROUP, RAY_AUTH_TOKEN=TOKEN)
    one_device = f"{ONE_GROUP} --actor_num_gpus_per_node 1"
    named, _ = machine.run_driver("report_placement", one_device, RAY_AUTH_TOKEN=TOKEN, RAY_ADDRESS="auto")
    record.unlink()
    assert report["error"] == "ConfigError"
    assert "sent only to a cluster that you name" in report["message"]
    assert len(named["groups"]["policy"]) == 1  # this user's processes listen at the recorded address


def test_an_unreachable_ray_address_is_an_error(machine, dead_address):
    report, _ = machine.run_driver("report_placement", ONE_GROUP, RAY_ADDRESS=dead_address)
    assert report["error"] == "ConfigError"
    assert f"RAY_ADDRESS is {dead_address}, but no Ray cluster answers" in report["message"]


def test_a_dashboard_address_is_an_error(machine):
    report, _ = machine.run_driver("report_placement", ONE_GROUP, RAY_ADDRESS="http://127.0.0.1:8265")
    assert "RAY_ADDRESS is http://127.0.0.1:8265" in report["message"]
    assert "ray job submit" in report["message"]


def test_too_many_devices_for_a_private_ray_are_rejected_before_it_starts(machine):
    cores = os.cpu_count()
    report, stderr = machine.run_driver("report_placement", f"{ONE_GROUP} --actor_num_gpus_per_node {4 * cores + 1}")
    assert report["error"] == "ConfigError"
    assert f"this machine has {4 * cores} of {4 * cores} free" in report["message"]
    assert "starting a private Ray" not in stderr


def test_a_private_ray_starts_with_an_interpreter_path_that_has_a_space(machine):
    machine.python = link_interpreter(machine.folder / "an environment")
    machine.environ = COLD  # a warm program would run from another path
    report, _ = machine.run_driver("report_placement", f"{ONE_GROUP} --actor_num_gpus_per_node 1")
    assert [one["RANK"] for one in report["groups"]["policy"]] == ["0"]


def test_a_private_ray_ends_with_a_killed_driver_and_the_next_one_starts(machine, dead_address):
    """A stale address file of an older Ray must affect neither of them."""
    warm, machine.environ = machine.environ, COLD  # the killed one has the processes that a user's has
    (machine.folder / "ray").mkdir()
    (machine.folder / "ray" / "ray_current_cluster").write_text(dead_address)
    flags = f"{ONE_GROUP} --actor_num_gpus_per_node 2"
    with machine.start_driver("run_forever", flags) as driver:
        assert driver.stdout.readline() == "up\n"
        processes = machine.processes()
        reaper = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if process.pid in processes and any("reaper.py" in word for word in process.info["cmdline"])
        ]
        driver.send_signal(signal.SIGKILL)
        assert len(reaper) == 1
        assert wait_until_gone(reaper)
        assert machine.processes() == []  # Ray's own agents would stay for another minute
        driver.communicate(timeout=WATCHDOG)
    assert list(machine.folder.glob("openrlhf-ray-*")) == []
    assert len(processes) > 4

    machine.environ = warm
    report, stderr = machine.run_driver("report_placement", flags)
    assert f"no Ray cluster answers at {dead_address}" in stderr
    assert "no GPU found: each of the run's devices (" in stderr
    assert report["unit"] == "CPU"
    assert [one["LOCAL_RANK"] for one in report["groups"]["policy"]] == ["0", "1"]
    assert len(report["engines"]) == 2
    assert report["sigterm_kept"]
    assert machine.processes() == []
    assert list((machine.folder / "home").iterdir()) == []  # no token file is left there
