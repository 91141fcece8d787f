"""Upstream's command lines, from 0.3 to 0.11.2: every flag is known, and its scripts pass the rules."""

import shlex
from pathlib import Path

import pytest

from openrlhf.config.aliases import known_spellings
from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flag_values
from openrlhf.config.parser import parse
from openrlhf.config.retired import RETIRED
from openrlhf.errors import ConfigError

RL = "--pretrain ./model --prompt_data ./data.jsonl --remote_rm_url ./reward.py"


def flags_of_upstream():
    """Names by command, from a file whose indented lines belong to the commands above them."""
    names: dict[str, list[str]] = {}
    commands: list[str] = []
    for line in (Path(__file__).parent / "upstream_flags.txt").read_text().splitlines():
        if not line.startswith(" "):
            commands = line.split()
        for command in commands:
            names.setdefault(command, []).extend(line.split() if line.startswith(" ") else [])
    return names


FLAGS = flags_of_upstream()


def read(command, typed):
    return parse(COMMANDS[command], shlex.split(typed), environ={})


@pytest.mark.parametrize("command", FLAGS)
def test_every_flag_of_every_release_is_known(command):
    known = set(known_spellings(COMMANDS[command]))
    assert [name for name in FLAGS[command] if name not in known] == []


DROPPED = [  # command, given flags, the printed line
    ("train_sft", "--disable_trace_cache", "--disable_trace_cache has no effect: DeepSpeed's parameter trace"),
    ("train_prm", "--torch_compile", "--torch_compile has no effect; --deepcompile compiles the decoder layers"),
    ("train_ppo", "--perf", "--perf has no effect: timings are always logged"),
    ("train_ppo_ray", "--actor_init_on_gpu", "--actor_init_on_gpu has no effect"),
    ("train_ppo_ray", "--ptx_coef 0.05", "--ptx_coef has no effect: there is no pre-training loss"),
    ("train_ppo", '--pretrain_data ""', "--pretrain_data has no effect"),
    ("train_ppo", "--pretrain_data_probs 1.0", "--pretrain_data_probs has no effect without --pretrain_data"),
    ("train_ppo_ray", "--pretrain_split=train", "--pretrain_split has no effect without --pretrain_data"),
    ("train_ppo_ray", "--max_images_per_prompt 0", "--max_images_per_prompt has no effect"),
    ("train_ppo_ray", "--data.max_images_per_prompt 0", "--data.max_images_per_prompt has no effect"),
    ("train_ppo_ray", "--image_key images", "--image_key has no effect: models are trained on text"),
    ("train_ppo_ray", "--data.image_key images", "--data.image_key has no effect: models are trained on text"),
    ("train_ppo_ray", "--freeze_visual_encoder", "--freeze_visual_encoder has no effect"),
    ("train_ppo_ray", "--actor.freeze_visual_encoder", "--actor.freeze_visual_encoder has no effect"),
]


@pytest.mark.parametrize(("command", "typed", "line"), DROPPED, ids=lambda item: str(item).split()[0])
def test_a_meaningless_flag_is_dropped_with_a_message(command, typed, line, capsys):
    assert read(command, f"--seed 7 {typed} --save_steps 3") == read(command, "--seed 7 --save_steps 3")
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_every_retired_flag_is_tested_above():
    assert {typed.split()[0].split("=")[0].removeprefix("--") for _, typed, _ in DROPPED} == RETIRED.keys()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--pretrain_data ./sft", "--pretrain_data ./sft would mix a pre-training loss into PPO|Try: train_sft"),
        ("--data.max_images_per_prompt=1", "would put images into prompts|Try: --max_images_per_prompt 0"),
        (
            "--algo.advantage.is_correction_level token --algo.advantage.is_correction_gating tv",
            "gating tv|gating ratio",
        ),
        ("--algo.advantage.is_correction_level seq --algo.advantage.is_correction_mode clip", "level seq|level token"),
    ],
)
def test_a_flag_that_would_change_what_is_learned_is_rejected(typed, message):
    with pytest.raises(ConfigError) as caught:
        read("train_ppo_ray", typed)
    for part in message.split("|"):
        assert part in str(caught.value)


def test_a_retired_flag_of_another_command_stays_unknown():
    with pytest.raises(ConfigError, match="--torch_compile is not a flag of this command"):
        read("serve_rm", "--torch_compile")


@pytest.mark.parametrize(
    ("typed", "enabled", "kind"),
    [
        ("level off", False, "tis"),
        ("level token", True, "icepop"),
        ("level token mode clip gating ratio", True, "tis"),
        ("level seq mode mask", True, "seq-mask-tis"),
    ],
)
def test_the_three_flags_of_a_correction_are_one_here(typed, enabled, kind):
    words = typed.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    argv = " ".join(f"--algo.advantage.is_correction_{name} {value}" for name, value in pairs)
    policy = read("train_ppo_ray", f"{argv} --algo.advantage.is_correction_threshold 0.5 5.0").policy
    assert bool(policy.enable_vllm_is_correction) is enabled
    assert policy.vllm_is_correction_type == kind


def test_retired_flags_are_also_recognised_in_files(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("torch_compile: true\nptx_coef: 0.05\nds: {zero_stage: 3}\n")
    assert read("train_ppo", f"--config {shlex.quote(str(file))}").sharding.zero_stage == 3
    assert capsys.readouterr().err.count("has no effect") == 2


# Arguments as upstream's pipelines pass them through a here-document: words are split, and quotes are kept.
HERE_DOCUMENTS = {
    "rejection sampling, generation": (
        "batch_inference",
        "--eval_task generate_vllm --pretrain ./model --bf16 --max_new_tokens 2048 --prompt_max_len 2048 "
        "--dataset ./data.jsonl --input_key context_messages --apply_chat_template --temperature 0.9 --zero_stage 0 "
        "--best_of_n 4 --enable_prefix_caching --tp_size 4 --max_num_seqs 64 --iter 0 --rollout_batch_size 10240 "
        "--output_path ./generate.jsonl",
        {"best_of_n": 4, "iter": 0},
    ),
    "rejection sampling, scores": (
        "batch_inference",
        "--eval_task rm --pretrain ./model --bf16 --max_len 4096 --dataset ./data.jsonl --dataset_probs 1.0 "
        "--zero_stage 0 --post_processor rs --micro_batch_size 4 --output_path ./rm.jsonl",
        {"post_processor": "rs"},
    ),
    "rejection sampling, training": (
        "train_sft",
        '--max_len 2048 --dataset ./data.jsonl --dataset_probs 1.0 --input_template "" --input_key input '
        "--output_key output --train_batch_size 128 --micro_train_batch_size 2 --pretrain ./model --zero_stage 2 "
        "--save_path ./out --lr_scheduler constant --max_epochs 1 --bf16 --learning_rate 2e-6 --gradient_checkpointing",
        {"input_template": None, "lr_scheduler": "constant"},
    ),
    "iterative dpo, training": (
        "train_dpo",
        '--max_len 4096 --dataset ./data.jsonl --dataset_probs 1.0 --prompt_key prompt --input_template "" '
        "--train_batch_size 128 --micro_train_batch_size 2 --pretrain ./model --ref_pretrain ./model --save_path ./out "
        "--zero_stage 3 --max_epochs 1 --bf16 --learning_rate 5e-7 --gradient_checkpointing",
        {"input_template": None, "ref_pretrain": "./model"},
    ),
}


# The multi-turn script of 0.8.10 to 0.9.x: a truncated distribution with correction.
GAMES = """
    --ref_num_nodes 1 --ref_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8 --vllm_num_engines 8
    --vllm_tensor_parallel_size 1 --colocate_all_models --agent_func_path ./agent.py --pretrain ./model --l2 0.01
    --vllm_gpu_memory_utilization 0.8 --micro_train_batch_size 8 --train_batch_size 256 --micro_rollout_batch_size 16
    --rollout_batch_size 128 --n_samples_per_prompt 16 --max_epochs 1 --prompt_max_len 1024 --num_episodes 1000000
    --generate_max_len 10240 --zero_stage 3 --bf16 --actor_learning_rate 5e-7 --init_kl_coef 0 --kl_estimator k2
    --advantage_estimator reinforce_baseline --prompt_data ./data.jsonl --input_key query --label_key label
    --normalize_reward --vllm_enable_sleep --use_dynamic_batch --deepspeed_enable_sleep --gradient_checkpointing
    --packing_samples --save_steps -1 --enforce_eager --eps_clip_low_high 0.2 0.28 --top_p 0.98
    --enable_vllm_is_correction
"""


def test_the_games_of_upstream_pass_every_rule(workspace):
    config = check(read("train_ppo_ray", GAMES), lambda line: None)
    assert config.rollout.whole_log_probs
    assert config.policy.enable_vllm_is_correction


@pytest.mark.parametrize("place", HERE_DOCUMENTS)
def test_the_pipelines_of_upstream_pass_every_rule(place, workspace):
    command, typed, expected = HERE_DOCUMENTS[place]
    values = flag_values(check(parse(COMMANDS[command], typed.split(), environ={}), lambda line: None))
    assert {name: values[name] for name in expected} == expected
