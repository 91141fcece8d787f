"""The benchmark of filtered rollouts: each way is a command that can run."""

import pytest
from filtered_rollouts import REWARD, WAYS, way_flags
from peers import ours
from peers.measurement import Task
from workload_files import write_files
from workloads import find_workload

from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.parser import parse
from openrlhf.config.runtime import generates_in_lockstep, is_asynchronous, surplus_groups


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workload")
    write_files(folder, find_workload("W2", tiny=True), steps=2)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_flags_pass_the_checks_of_the_command(files, way):
    workload = find_workload("W2")
    extra = way_flags(way, workload.prompts, files / "run")
    task = Task(workload, files, 4, tiny=False, memory=0.35, extra=extra)
    config = check(parse(COMMANDS["train_ppo_ray"], ours.flags(task)))
    assert config.rollout.dynamic_filtering
    assert not generates_in_lockstep(config)
    assert is_asynchronous(config) == way.startswith("async")
    assert surplus_groups(config) == (32 if way == "async oversampled" else 0)


def test_half_of_the_groups_pass():
    found = {}
    exec(REWARD.format(pass_rate=0.5), found)
    groups = [found["reward_func"](["x"] * 8, [str(number)] * 8, [""] * 8)["scores"] for number in range(1000)]
    assert 450 < sum(0 < sum(scores) < 8 for scores in groups) < 550
