"""Placement from flags alone: groups of models, engines, blocks of devices, and the nodes they fit on."""

import shlex

import pytest
import torch

from openrlhf.cluster.driver import private_slots
from openrlhf.cluster.placement import (
    DeviceBlock,
    EnginePlan,
    GroupPlan,
    Node,
    PlacementPlan,
    explain_shortage,
    pack,
    place,
    plan,
)
from openrlhf.config.commands import RLConfig
from openrlhf.config.parser import parse

BASE = "--pretrain ./model --prompt_data ./data.jsonl --runtime ray"
REWARD_MODEL = "--reward_pretrain ./reward"
FUNCTION = "--remote_rm_url ./reward.py"


def make_plan(flags):
    return plan(parse(RLConfig, shlex.split(f"{BASE} {flags}"), environ={}))


def group_names(flags):
    return [group.name for group in make_plan(flags).groups]


def nodes(*free, total=8):
    return [Node(f"n{number}", f"10.0.0.{number}", total, room, 64) for number, room in enumerate(free)]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (REWARD_MODEL, ["policy", "reference", "critic", "reward"]),
        (FUNCTION, ["policy", "reference", "critic"]),
        (
            f"{REWARD_MODEL} {FUNCTION}",
            ["policy", "reference", "critic"],
        ),  # the reward model only initialises the critic
        (f"{REWARD_MODEL} --agent_func_path ./agent.py", ["policy", "reference", "critic", "reward"]),
        (f"{FUNCTION} --advantage_estimator reinforce", ["policy", "reference"]),
        (f"{FUNCTION} --advantage_estimator reinforce --init_kl_coef 0", ["policy"]),
        (f"{FUNCTION} --colocate_actor_ref --init_kl_coef 0", ["policy", "critic"]),
        (f"{REWARD_MODEL} --colocate_actor_ref", ["policy+reference", "critic", "reward"]),
        (f"{REWARD_MODEL} --colocate_critic_reward", ["policy", "reference", "critic+reward"]),
        (f"{REWARD_MODEL} --colocate_actor_ref --colocate_critic_reward", ["policy+reference", "critic+reward"]),
        (f"{REWARD_MODEL},./other", ["policy", "reference", "critic", "reward-0", "reward-1"]),
        (f"{REWARD_MODEL},./other --colocate_critic_reward", ["policy", "reference", "critic+reward"]),
        (f"{REWARD_MODEL} --colocate_all_models", ["models"]),
    ],
)
def test_each_set_of_roles_that_shares_processes_is_a_group(flags, expected):
    assert group_names(flags) == expected


def test_all_models_together_are_one_process_per_device_of_the_policy():
    (models,) = make_plan(f"{REWARD_MODEL},./b --colocate_all_models --actor_num_gpus_per_node 4").groups
    assert models == GroupPlan("models", ("actor", "ref", "critic", "reward"), 1, 4, rewards=(0, 1))


def test_each_role_has_its_own_device_count_with_default_eight():
    found = make_plan(f"{REWARD_MODEL} --actor_num_nodes 2 --actor_num_gpus_per_node 4 --reward_num_gpus_per_node 1")
    assert {group.name: (group.nodes, group.devices_per_node) for group in found.groups} == {
        "policy": (2, 4),
        "reference": (1, 8),
        "critic": (1, 8),
        "reward": (1, 1),
    }
    assert found.groups[0].size == 8


def test_hybrid_engines_share_the_devices_of_the_models():
    found = make_plan(f"{FUNCTION} --colocate_all_models --vllm_num_engines 4 --vllm_tensor_parallel_size 2")
    assert found.engines == tuple(EnginePlan(number, 2, "models") for number in range(4))
    assert found.blocks() == (DeviceBlock("models", 8),)


def test_several_engines_share_a_gpu():
    hybrid = make_plan(f"{FUNCTION} --colocate_all_models --vllm_num_engines 8 --vllm_engines_per_gpu 2")
    assert [engine.place for engine in hybrid.engines] == [number // 2 for number in range(16)]
    assert hybrid.blocks() == (DeviceBlock("models", 8),)
    own = make_plan(f"{FUNCTION} --vllm_num_engines 2 --vllm_engines_per_gpu 2")
    assert [engine.name for engine in own.engines] == ["engine-0", "engine-0", "engine-1", "engine-1"]
    assert own.blocks()[-2:] == (DeviceBlock("engine-0", 1), DeviceBlock("engine-1", 1))
    assert own.describe().endswith("engines 2 x 1 with 2 engines each")


@pytest.mark.parametrize("flags", ["", "--colocate_all_models --async_train"])
def test_other_engines_have_their_own_devices(flags):
    found = make_plan(f"{FUNCTION} {flags} --vllm_num_engines 2 --vllm_tensor_parallel_size 4")
    assert [engine.shares for engine in found.engines] == [None, None]
    assert found.blocks()[-2:] == (DeviceBlock("engine-0", 4), DeviceBlock("engine-1", 4))


def test_without_vllm_each_policy_process_gets_a_transformers_engine():
    found = make_plan(f"{FUNCTION} --actor_num_gpus_per_node 2 --colocate_actor_ref --ref_num_gpus_per_node 2")
    assert found.engines == (EnginePlan(0, 1, "policy+reference"), EnginePlan(1, 1, "policy+reference"))


def test_a_block_is_placed_on_a_single_node():
    flags = "--advantage_estimator reinforce --actor_num_nodes 2 --actor_num_gpus_per_node 4 --ref_num_gpus_per_node 2"
    found = make_plan(f"{FUNCTION} {flags} --vllm_num_engines 1")
    assert found.blocks() == (
        DeviceBlock("policy", 4),
        DeviceBlock("policy", 4),
        DeviceBlock("reference", 2),
        DeviceBlock("engine-0", 1),
    )
    assert found.devices == 11
    assert found.describe() == "policy 2 x 4, reference 1 x 2, engines 1 x 1"


def test_blocks_go_to_the_fullest_node_with_enough_free_devices():
    blocks = [DeviceBlock("a", 2), DeviceBlock("b", 8), DeviceBlock("c", 4)]
    assert pack(blocks, nodes(8, 6)) == ("n1", "n0", "n1")


def test_the_nodes_of_a_group_are_different_nodes():
    blocks = [DeviceBlock("a", 4), DeviceBlock("a", 4)]
    assert pack(blocks, nodes(8)) is None
    assert set(pack(blocks, nodes(8, 8)) or ()) == {"n0", "n1"}


def test_packing_backtracks_from_a_dead_end():
    blocks = [
        DeviceBlock("a", 1),
        DeviceBlock("a", 1),
        DeviceBlock("engine-0", 2),
    ]  # the engine fits the smaller node, but must not take it
    assert pack(blocks, nodes(3, 2)) == ("n0", "n1", "n0")


def test_many_blocks_that_do_not_fit_are_rejected_quickly():
    blocks = [DeviceBlock(f"engine-{number}", 3) for number in range(40)]
    assert pack(blocks, nodes(*[8] * 16)) is None


def engine_nodes(flags, *free, total=8):
    """Return the nodes of each engine, and on how many of their devices."""
    placed = place(make_plan(f"{FUNCTION} {flags} --vllm_num_engines 1"), nodes(*free, total=total))
    if placed is None:
        return None
    spread, chosen = placed
    found = zip(spread.blocks(), chosen, strict=True)
    return [(node, block.devices) for block, node in found if block.owner == "engine-0"]


ONE_DEVICE = "--advantage_estimator reinforce --init_kl_coef 0 --actor_num_gpus_per_node 1"


@pytest.mark.parametrize(
    ("sizes", "free", "expected"),
    [
        ((4, 2), [8, 8, 1], [("n0", 8)]),  # one node, if there is one
        ((8, 2), [8, 8, 1], [("n0", 8), ("n1", 8)]),  # whole stages on a node
        ((2, 4), [4, 4, 1], [("n0", 4), ("n1", 4)]),  # two stages on each of two nodes
        ((2, 4), [3, 2, 2, 2], [("n0", 2), ("n1", 2), ("n2", 2), ("n3", 2)]),
        ((4, 1), [2, 2, 1], None),  # a fragmented cluster: a node has enough devices, but others use them
        ((4, 2), [4, 2, 2, 1], None),
        ((3, 2), [5, 3], [("n1", 3), ("n0", 3)]),  # never a stage and a half
        ((8, 1), [4, 2, 2], None),
    ],
)
def test_an_engine_is_on_as_few_nodes_as_possible(sizes, free, expected):
    tensor, pipeline = sizes
    flags = f"{ONE_DEVICE} --vllm_tensor_parallel_size {tensor} --vllm_pipeline_parallel_size {pipeline}"
    found = engine_nodes(flags, *free)
    assert (found and sorted(found)) == (expected and sorted(expected))


def test_a_stage_is_divided_if_no_node_has_enough_devices():
    flags = f"{ONE_DEVICE} --vllm_tensor_parallel_size 4"
    found = engine_nodes(flags, 2, 2, 1, total=2)
    assert found is not None
    assert sorted(found) == [("n0", 2), ("n1", 2)]


def test_an_engine_that_could_be_on_one_node_of_a_fragmented_cluster_is_explained():
    message = shortage(
        "--init_kl_coef 0 --actor_num_gpus_per_node 1 --vllm_num_engines 1 --vllm_tensor_parallel_size 8", nodes(5, 4)
    )
    assert "an engine needs all devices of a pipeline stage on one node" in message


def test_hybrid_engines_span_the_nodes_of_the_policy():
    flags = "--actor_num_nodes 2 --actor_num_gpus_per_node 4 --vllm_num_engines 1"
    found = make_plan(
        f"{FUNCTION} --colocate_all_models {flags} --vllm_tensor_parallel_size 4 --vllm_pipeline_parallel_size 2"
    )
    assert found.engines == (EnginePlan(0, 8, "models", nodes=2, stages=2),)
    assert found.blocks() == (DeviceBlock("models", 4), DeviceBlock("models", 4))


def test_stages_are_described():
    flags = "--vllm_num_engines 3 --vllm_tensor_parallel_size 4 --vllm_pipeline_parallel_size 2"
    assert make_plan(f"{FUNCTION} {ONE_DEVICE} {flags}").describe() == "policy 1 x 1, engines 3 x 2 stages x 4"


def test_a_block_is_never_split():
    assert pack([DeviceBlock("engine-0", 4)], nodes(3, 3)) is None


def shortage(flags, found, *, private=False):
    return str(
        explain_shortage(
            make_plan(f"{FUNCTION} --advantage_estimator reinforce {flags}"), found, "GPU", private=private
        )
    )


def test_the_error_for_too_few_devices_lists_requested_and_free_devices():
    message = shortage("--vllm_num_engines 2", nodes(8))
    assert "asks for 18 GPUs (policy 1 x 8, reference 1 x 8, engines 2 x 1)" in message
    assert "10.0.0.0 has 8 of 8 free" in message
    assert "Try: --colocate_all_models, or smaller --*_num_nodes" in message


@pytest.mark.parametrize("flags", ["--actor_num_gpus_per_node 9", "--colocate_all_models --async_train"])
def test_sharing_devices_is_suggested_only_if_it_helps(flags):
    message = shortage(f"--vllm_num_engines 2 {flags}", nodes(8))
    assert "Try: smaller --*_num_nodes, --*_num_gpus_per_node and --vllm_num_engines" in message


def test_for_generation_only_fewer_engines_are_suggested():
    engines = PlacementPlan((), tuple(EnginePlan(number, 1, None) for number in range(9)))
    assert str(explain_shortage(engines, nodes(8), "GPU", private=True)).endswith("Try: a smaller --vllm_num_engines")


def test_devices_in_use_are_distinguished_from_missing_devices():
    assert "ray status" in shortage("--init_kl_coef 0", nodes(3))
    assert "ray status" not in shortage("--init_kl_coef 0", nodes(3, total=4))


def test_devices_on_the_wrong_nodes_are_explained():
    assert "a group needs all devices that it uses per node" in shortage("--init_kl_coef 0", nodes(4, 4))


def test_too_few_nodes_are_explained_for_joined_and_private_ray():
    flags = "--init_kl_coef 0 --actor_num_nodes 2 --actor_num_gpus_per_node 1"
    assert "expected 2 nodes, got 1" in shortage(flags, nodes(8))
    assert "ray start on every node" in shortage(flags, nodes(8), private=True)


def test_a_cluster_without_nodes_is_reported():
    assert "no node is alive" in shortage("", [])


@pytest.mark.parametrize(("cores", "advised"), [(2, True), (16, False)])
def test_more_processes_than_cores_are_reported_with_the_flags_to_change(cores, advised, monkeypatch, capsys):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    asked = make_plan(f"{FUNCTION} --advantage_estimator group_norm --n_samples_per_prompt 4 --init_kl_coef 0")
    assert private_slots(asked) == {"num_cpus": max(cores, 8), "num_gpus": 0}
    stderr = capsys.readouterr().err
    assert f"(policy 1 x 8) is a process on this machine, which has {cores} CPU cores" in stderr
    assert ("Try: smaller --*_num_gpus_per_node (default: 8), or --runtime local" in stderr) == advised
