"""Which phases hold what, whether a run fits, and the flags that help."""

from dataclasses import replace

import pytest

from openrlhf.plan.assessment import assess, remedy, suggestions
from openrlhf.plan.gpus import GIB, GPUS, Machine
from openrlhf.plan.report import render, to_json
from openrlhf.plan.terms import total
from tests.plan.conftest import LARGE, SMALL, sizes

RAY = "train_ppo_ray --runtime ray --actor_num_gpus_per_node 1 --critic_num_gpus_per_node 1 --ref_num_gpus_per_node 1"
PPO = f"{RAY} --pretrain {SMALL} --colocate_all_models --vllm_num_engines 1 --vllm_gpu_memory_utilization 0.6"
SLEEPS = f"{PPO} --vllm_enable_sleep --deepspeed_enable_sleep"


def roles_in(plan, phase):
    return {term.role for term in plan.phase(phase).device} - {"PyTorch"}


def test_sleeping_models_and_engines_take_turns(plan):
    found = plan(SLEEPS)
    assert roles_in(found, "generation") == {"engine", "reference"}
    assert roles_in(found, "training") == {"policy", "reference"}
    assert roles_in(found, "sync") == {"policy", "reference", "engine"}
    assert sizes(term for term in found.phase("sync").device if term.role == "engine").keys() == {"weights"}
    assert sizes(found.phase("generation").host)["asleep"] > 0


def test_without_sleep_everything_is_on_the_device(plan):
    found = plan(PPO)
    for phase in ("generation", "training", "sync"):
        assert roles_in(found, phase) == {"policy", "critic", "reference", "engine"}
    assert "asleep" not in sizes(found.phase("generation").host)


@pytest.mark.parametrize(
    ("flags", "averages"), [("--zero_stage 2", 1), ("--zero_stage 3", 1 / 2), ("--backend fsdp", 1 / 2)]
)
def test_each_node_averages_its_own_shards(plan, shapes, flags, averages):
    """With 16 devices on two nodes, a node averages its half, or everything if the first process does all of it."""
    policy = "--actor_num_nodes 2 --actor_num_gpus_per_node 8 --enable_ema --advantage_estimator reinforce"
    command = f"train_ppo_ray --runtime ray --pretrain {SMALL} --vllm_num_engines 2 --init_kl_coef 0 {policy} {flags}"
    found = plan(command, Machine(GPUS["H100"], 8, 3))
    count = shapes[SMALL, False].parameters
    assert sizes(found.groups[0].phases[0].host)["moving average"] == pytest.approx(4 * count * averages)


def test_roles_and_engines_with_devices_of_their_own_are_groups(plan):
    found = plan(f"{RAY} --pretrain {SMALL} --vllm_num_engines 2", Machine(GPUS["H100"], 8))
    assert [group.name for group in found.groups] == ["policy", "reference", "critic", "engines"]
    assert found.work.devices == 5
    assert [phase.phase for phase in found.groups[1].phases] == ["loading", "experience"]


def test_one_process_has_one_group(plan):
    found = plan(f"train_ppo --pretrain {SMALL} --max_len 1024 --rollout_batch_size 8 --train_batch_size 8")
    assert len(found.groups) == 1
    assert sizes(term for term in found.phase("generation").device if term.role == "engine").keys() == {
        "KV cache",
        "activations",
    }


@pytest.mark.parametrize(
    ("flags", "gpu", "fit"),
    [
        (f"train_sft --pretrain {SMALL} --max_len 1024 --micro_train_batch_size 1", "H200", "fits"),
        (f"train_sft --pretrain {SMALL} --max_len 1024 --micro_train_batch_size 32", "H200", "is tight"),
        (f"train_sft --pretrain {SMALL} --max_len 1024 --micro_train_batch_size 64", "H200", "does not fit"),
        (f"train_sft --pretrain {SMALL} --max_len 16 --micro_train_batch_size 1", "T4", "cannot fit"),
        (f"train_sft --pretrain {SMALL} --max_len 16 --lora_rank 8", "T4", "fits"),
        (f"{PPO} --vllm_gpu_memory_utilization 0.95", "H200", "cannot fit"),
    ],
)
def test_a_run_fits_or_not(plan, flags, gpu, fit):
    assert plan(flags, Machine(GPUS[gpu])).fit == fit


def test_an_engine_must_have_room_for_its_weights(plan):
    policy = "--lora_rank 8 --zero_stage 3 --gradient_checkpointing --actor_num_gpus_per_node 8 --max_len 1024"
    flags = f"{policy} --advantage_estimator group_norm --n_samples_per_prompt 4 --init_kl_coef 0 --vllm_num_engines 4"
    found = plan(f"train_ppo_ray --pretrain {LARGE} --runtime ray {flags}", Machine(GPUS["H100"], 8, 2))
    assert found.fit == "cannot fit"
    assert "a vLLM engine on 1 device lacks" in found.problem()
    assert any("--vllm_tensor_parallel_size 2 --vllm_num_engines 2" in change.flags for change in suggestions(found))


def test_host_memory_counts_if_it_is_known(plan, shapes):
    found = plan(SLEEPS)
    for gib, fit in ((None, "fits"), (30, "cannot fit"), (500, "fits")):
        room = None if gib is None else gib * GIB
        machine = replace(found.machine, host_memory=room)
        assert assess(found.work, machine, shapes).fit == fit
    assert (
        "of host memory on each node"
        in assess(found.work, replace(found.machine, host_memory=30 * GIB), shapes).problem()
    )


def test_only_resumable_runs_need_host_memory_for_checkpoints(plan):
    command = f"train_sft --pretrain {SMALL} --max_len 1024"
    assert "files being written" in sizes(plan(command).phase("saving").host)
    assert "files being written" not in sizes(plan(f"{command} --disable_ds_ckpt").phase("saving").host)


def test_samples_in_a_micro_batch_share_their_prompt(plan):
    """Of 4 samples with 512 + 512 tokens, a micro-batch of 4 computes one prompt, so 5/8 of their own tokens."""
    command = f"train_ppo --pretrain {SMALL} --max_len 1024 --max_new_tokens 512 --n_samples_per_prompt 4 --deepcompile"
    seconds = [
        next(
            one.seconds for one in plan(f"{command} --micro_train_batch_size {size}").seconds if one.phase == "training"
        )
        for size in (4, 1)
    ]
    assert seconds[0] / seconds[1] == pytest.approx(5 / 8, abs=0.1)  # attention and the head do not shrink


def test_changes_come_by_effect_and_each_one_saves(plan):
    found = plan(f"train_sft --pretrain {SMALL} --max_len 1024 --micro_train_batch_size 64")
    peaks = [change.peak for change in suggestions(found)]
    assert peaks == sorted(peaks)
    assert all(peak < found.peak for peak in peaks)
    assert suggestions(found)[0].flags == "--gradient_checkpointing"


def test_a_remedy_fits_and_changes_what_is_learned_last(plan, shapes):
    machine = Machine(GPUS["A100-80"], 8, 2)
    found = plan(f"train_sft --pretrain {LARGE} --max_len 4096 --micro_train_batch_size 2", machine)
    chosen = remedy(found)
    assert [change.flags for change in chosen] == ["--gradient_checkpointing", "--zero_stage 3", "--adam_offload"]
    assert assess(chosen[-1].work, machine, shapes).fit == "fits"
    small = plan(f"train_sft --pretrain {LARGE} --max_len 512", Machine(GPUS["A100-80"]))
    assert remedy(small)[-1].flags == "--lora_rank 32 --load_in_4bit"


def test_nothing_helps_if_the_weights_alone_are_too_large(plan):
    found = plan(f"train_sft --pretrain {LARGE} --max_len 512", Machine(GPUS["T4"]))
    assert remedy(found) == []
    assert "No combination of these fits" in render(found, "train_sft")


def test_the_tables_add_up(plan):
    found = plan(SLEEPS)
    text = render(found, "train_ppo_ray")
    totals = [line for line in text.splitlines() if line.startswith("  total")]
    peaks = [float(word) for word in totals[0].split()[1:]]
    assert peaks == [round(total(phase.device) / GIB, 1) for phase in found.groups[0].phases]
    assert max(map(len, text.splitlines())) <= 170
    assert '"fit": "fits"' in to_json(found, "train_ppo_ray")


def test_seconds_name_what_limits_them(plan):
    limits = {one.phase: one.limit for one in plan(SLEEPS).seconds}
    assert limits.keys() == {"generation", "experience", "training", "sync"}
    assert limits["sync"] == "copies to and from host memory"
    offloaded = plan(f"train_sft --pretrain {SMALL} --max_len 512 --train_batch_size 8 --adam_offload").seconds
    assert offloaded[0].limit == "optimizer on the CPU"
    assert plan(f"train_sft --pretrain {SMALL}", Machine(None)).seconds == ()
