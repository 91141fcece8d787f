"""Joining, starting, counting and leaving a real Ray. Drivers are processes of their own (ray_drivers.py)."""

import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from tests.cluster.ray_machine import COLD, HERE, WATCHDOG, link_interpreter, make_machine, wait_until_gone

pytestmark = pytest.mark.slow(seconds=6)
TOKEN = "0123456789abcdef" * 4
ONE_GROUP = "--advantage_estimator reinforce --init_kl_coef 0"


@pytest.fixture(scope="module")
def two_nodes():
    """A cluster with a token, of nodes with 2 and 3 devices that count as GPUs, and how to join it."""
    made = make_machine()
    with made.start("two_nodes", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as cluster:
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
    seen, _ = machine.see("look_around", f"{flags} --vllm_tensor_parallel_size 2", **environ)
    ranks, (engine,) = seen["groups"]["policy"], seen["engines"]
    assert [(one["RANK"], one["WORLD_SIZE"], one["LOCAL_RANK"]) for one in ranks] == [("0", "2", "0"), ("1", "2", "0")]
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in ranks}) == 1
    assert ranks[0]["node"] != ranks[1]["node"]
    assert all(one["node"] == one["told"] for one in [*ranks, engine])
    assert {one["TORCH_CPP_LOG_LEVEL"] for one in [*ranks, engine]} == {"ERROR"}
    beside = [one["CUDA_VISIBLE_DEVICES"] for one in ranks if one["node"] == engine["node"]]
    assert sorted([*engine["CUDA_VISIBLE_DEVICES"].split(","), *beside]) == ["0", "1", "2"]
    assert Path(engine["package"]).is_relative_to(HERE.parents[1])


def test_ranks_follow_the_numbers_of_the_devices_and_hybrid_engines_share_them(two_nodes):
    machine, environ = two_nodes
    counts = "--actor_num_gpus_per_node 2 --vllm_num_engines 1 --vllm_tensor_parallel_size 2"
    seen, _ = machine.see("look_around", f"{ONE_GROUP} --colocate_all_models {counts}", **environ)
    ranks = [one["CUDA_VISIBLE_DEVICES"] for one in seen["groups"]["models"]]
    assert ranks == sorted(ranks)
    assert {one["LOCAL_RANK"] for one in seen["groups"]["models"]} == {"0"}  # torch calls the one GPU it sees number 0
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen["engines"]] == [",".join(ranks)]


@pytest.mark.parametrize(("inherited", "devices"), [(None, ["0", "1"]), ("4,7", ["4", "7"])])
def test_each_rank_has_the_device_that_ray_assigned_though_ray_sets_no_variable(machine, inherited, devices):
    environ = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    environ |= {"CUDA_VISIBLE_DEVICES": inherited} if inherited else {}
    counts = "--actor_num_gpus_per_node 2 --vllm_num_engines 1 --vllm_tensor_parallel_size 2"
    seen, _ = machine.see("two_gpus", f"{ONE_GROUP} --colocate_all_models {counts}", **environ)
    ranks = [(one["CUDA_VISIBLE_DEVICES"], one["LOCAL_RANK"]) for one in seen["groups"]["models"]]
    assert ranks == [(device, "0") for device in devices]  # each sees one GPU, which torch calls number 0
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen["engines"]] == [",".join(devices)]


def test_more_devices_than_there_are_is_refused_and_nothing_stays_reserved(two_nodes):
    machine, environ = two_nodes
    seen, _ = machine.see("look_around", f"{ONE_GROUP} --actor_num_gpus_per_node 4", **environ)
    assert seen["error"] == "ConfigError"
    assert "asks for 4 GPUs (policy 1 x 4)" in seen["message"]
    assert "2 of 2 free" in seen["message"]
    assert "3 of 3 free" in seen["message"]


def test_a_folder_that_the_nodes_do_not_share_is_refused(two_nodes):
    """/proc/self/cwd is another folder in every process that stands elsewhere: here, in the workers of the nodes."""
    machine, environ = two_nodes
    (machine.folder / "elsewhere").mkdir(exist_ok=True)
    flags = f"{ONE_GROUP} --actor_num_nodes 2 --actor_num_gpus_per_node 1 --save_path ./out"
    seen, _ = machine.see("unshared", f"{flags} --ckpt_path /proc/self/cwd/ckpt", **environ)
    assert seen["error"] == "ConfigError"
    assert "--ckpt_path /proc/self/cwd/ckpt is not one folder for all nodes" in seen["message"]
    assert list((machine.folder / "elsewhere").iterdir()) == []


def test_a_cluster_with_a_token_is_joined_with_it_alone(two_nodes):
    machine, environ = two_nodes
    seen, _ = machine.see("look_around", ONE_GROUP, RAY_ADDRESS=environ["RAY_ADDRESS"])
    assert seen["error"] == "ConfigError"
    assert "wants a token" in seen["message"]
    assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=" in seen["message"]


def test_a_cluster_that_was_named_and_is_gone_is_an_error(machine, dead_address):
    seen, _ = machine.see("look_around", ONE_GROUP, RAY_ADDRESS=dead_address)
    assert seen["error"] == "ConfigError"
    assert f"RAY_ADDRESS is {dead_address}, but no Ray answers" in seen["message"]


def test_an_address_for_clients_is_an_error(machine):
    seen, _ = machine.see("look_around", ONE_GROUP, RAY_ADDRESS="http://127.0.0.1:8265")
    assert "RAY_ADDRESS is http://127.0.0.1:8265" in seen["message"]
    assert "ray job submit" in seen["message"]


def test_a_private_ray_with_too_many_devices_is_refused_before_it_starts(machine):
    cores = os.cpu_count()
    seen, said = machine.see("look_around", f"{ONE_GROUP} --actor_num_gpus_per_node {4 * cores + 1}")
    assert seen["error"] == "ConfigError"
    assert f"this machine has {4 * cores} of {4 * cores} free" in seen["message"]
    assert "starting a Ray" not in said


def test_an_interpreter_in_a_folder_with_a_space_has_a_private_ray(machine):
    machine.python = link_interpreter(machine.folder / "an environment")
    machine.surroundings = COLD  # a warm one would be elsewhere
    seen, _ = machine.see("look_around", f"{ONE_GROUP} --actor_num_gpus_per_node 1")
    assert [one["RANK"] for one in seen["groups"]["policy"]] == ["0"]


def test_a_killed_driver_takes_its_ray_along_and_the_next_one_starts(machine, dead_address):
    """The address file of a Ray that died long ago is in the way of neither."""
    machine.surroundings = COLD
    (machine.folder / "ray").mkdir()
    (machine.folder / "ray" / "ray_current_cluster").write_text(dead_address)
    flags = f"{ONE_GROUP} --actor_num_gpus_per_node 2"
    with machine.start("stay", flags) as driver:
        assert driver.stdout.readline() == "up\n"
        processes = machine.processes()
        driver.send_signal(signal.SIGKILL)
        assert wait_until_gone(processes)
        driver.communicate(timeout=WATCHDOG)
    assert len(processes) > 4
    assert machine.processes() == []

    seen, said = machine.see("look_around", flags)
    assert f"Ray at {dead_address} is gone" in said
    assert "processes on" in said
    assert seen["unit"] == "CPU"
    assert [one["LOCAL_RANK"] for one in seen["groups"]["policy"]] == ["0", "1"]
    assert len(seen["engines"]) == 2
    assert seen["sigterm_kept"]
    assert machine.processes() == []
    assert list((machine.folder / "home").iterdir()) == []  # no token is left there
