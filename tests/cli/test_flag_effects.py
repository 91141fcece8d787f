"""No flag is ignored silently: a flag that a run does not read is reported in one line, or rejected.

Each command runs for real, at tiny scale, while reads of flags are recorded (flag_reads.py). A flag that no code
outside the config read must have a row in `openrlhf.config.no_effect.table`, or be rejected. So this test fails for a
new flag that nothing uses, and for a flag that is used only under a condition that no row of the table states.
"""

import ast
import io
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import torch

import openrlhf
from openrlhf.config.check import check
from openrlhf.config.commands import COMMANDS
from openrlhf.config.flags import flags_of, replace_flags, without_none
from openrlhf.config.no_effect.lines import EMPTY, idle_flags
from openrlhf.config.no_effect.table import ON_CPU, STEPS_ONLY, TABLE, WITHOUT_STEPS
from openrlhf.config.no_effect.training import ALWAYS
from openrlhf.config.parser import parse
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.errors import ConfigError
from openrlhf.inference import serve
from openrlhf.training.preflight import explain_hardware
from openrlhf.view import server as view_server
from tests.byte_models import make_byte_model
from tests.cli.flag_reads import recorded_reads
from tests.commands import FAST, as_argv, run_command
from tests.rl.toy_task import SMALL, make_prompts, task_flags
from tests.toy_data import ANSWERS, PAIRS, STEPS, answers, pairs, steps, verdicts, write_rows

ROWS = {  # command -> rows of its dataset, flags that name their fields
    "train_sft": (answers, ANSWERS),
    "train_rm": (pairs, PAIRS),
    "train_dpo": (pairs, PAIRS),
    "train_kto": (verdicts, ANSWERS),
    "train_kd": (answers, ANSWERS),
    "train_prm": (steps, STEPS),
}
# Flags read in another process, or whose effect is known only after the models have loaded.
READ_ELSEWHERE = {
    "train_ppo with an agent": {"tokenizer_chat_template", "system_prompt", "chat_template_kwargs"},  # by the agent
    "train_ppo_ray with reward models": {flag for row in WITHOUT_STEPS for flag in row.flags},
}
# Code passes these on in every run; code further down uses them only under the table's condition.
PASSED_ON = {
    *("eval_steps", "best_metric_key", "wandb_run_name", "param_dtype", "use_ms", "min_lr_ratio", "label_key", "lambd"),
    *("critic_muon_lr", "critic_muon_momentum", "critic_muon_ns_steps", "critic_muon_nesterov"),
    *("critic_lr_scheduler", "critic_min_lr_ratio", "save_value_network"),
    *("kl_horizon", "kl_target", "kl_estimator", "use_kl_loss", "kl_unbiased_gradient"),
    *("reward_pretrain", "step_rewards", "on_reward_error"),
    *("ipo_length_average", "rollout_batch_size", "system_prompt", "input_template"),
    *(f"{role}_num_{unit}" for role in ("ref", "critic", "reward") for unit in ("nodes", "gpus_per_node")),
    *("micro_train_batch_size", "micro_rollout_batch_size"),
    *("vllm_tensor_parallel_size", "vllm_pipeline_parallel_size"),
}


def supervised(command, folder, model, **flags):
    rows, fields = ROWS[command]
    paths = {
        "pretrain": model,
        "dataset": write_rows(folder / f"{command}.jsonl", rows(16)),
        "save_path": f"./{command}",
    }
    teacher = {"teacher_model": model} if command == "train_kd" else {}
    saves = {"ckpt_path": f"./{command}_ckpt", "save_steps": 1}
    return FAST | fields | paths | teacher | saves | {"device": "cpu"} | flags


def rl(folder, model, **flags):
    shape = {name: value for name, value in SMALL.items() if name not in ("advantage_estimator", "init_kl_coef")}
    paths = {"pretrain": model, "save_path": "./rl", "ckpt_path": "./rl_ckpt", "save_steps": 1, "device": "cpu"}
    return shape | task_flags(folder, make_prompts(8)) | paths | flags


def rl_with_reward_model(folder, model):
    run_command("train_rm", supervised("train_rm", folder, model, save_path="./rm"))
    return rl(folder, model, remote_rm_url=None, reward_pretrain="./rm", advantage_estimator="rloo", init_kl_coef=0)


def rl_with_agent(folder, model):
    (folder / "agent.py").write_text(AGENT)
    flags = {"remote_rm_url": None, "agent_func_path": str(folder / "agent.py"), "use_dynamic_batch": True}
    return rl(folder, model, **flags, async_train=True, optim="muon", lora_rank=4)


AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        pass

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        return {"rewards": 1.0, "scores": 1.0, "environment_feedback": "", "done": True, "extra_logs": {}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def generation(folder, model):
    prompts = write_rows(folder / "prompts.jsonl", make_prompts(4))
    return {"eval_task": "generate", "pretrain": model, "dataset": prompts, "output_path": "./generated.jsonl"} | SHORT


def scoring(folder, model):
    run_command("train_rm", supervised("train_rm", folder, model, save_path="./rm"))
    rows = write_rows(folder / "answers.jsonl", answers(4))
    return {"eval_task": "rm", "pretrain": "./rm", "dataset": rows, "output_path": "./scored.jsonl", "device": "cpu"}


def serving(folder, model):
    run_command("train_rm", supervised("train_rm", folder, model, save_path="./rm"))
    return {"reward_pretrain": "./rm", "port": 1, "device": "cpu"}


def merging(folder, model):
    run_command("train_sft", supervised("train_sft", folder, model, save_path="./adapter", lora_rank=2))
    return {"model_path": model, "lora_path": "./adapter", "output_path": "./merged"}


def viewing(folder, model):
    run_command("train_sft", supervised("train_sft", folder, model, save_path="./sft"))
    return {"": "./sft", "port": 1}


def exporting(folder, model):
    return {"pretrain": make_byte_model(folder / "source"), "output_path": "./exported", "gguf": "f16"}


SHORT = {"max_new_tokens": 4, "device": "cpu"}
RUNS = {  # name, which starts with the command -> function that returns its flags
    **{command: lambda folder, model, command=command: supervised(command, folder, model) for command in ROWS},
    "train_sft in chat form": lambda folder, model: supervised(
        "train_sft", folder, model, apply_chat_template=True, input_template=None
    ),
    "train_ppo": rl,
    "train_ppo_ray with reward models": rl_with_reward_model,
    "train_ppo with an agent": rl_with_agent,
    "batch_inference generates": generation,
    "batch_inference scores": scoring,
    "interactive_chat": lambda folder, model: {"pretrain": model, "max_len": 40, "device": "cpu"},
    "serve_rm": serving,
    "lora_combiner": merging,
    "init": lambda folder, model: {"task": "grpo", "output": "run.yaml"},
    "doctor": lambda folder, model: {"online": True},
    "view": viewing,
    "export to GGUF": exporting,
    "export to Transformers": lambda folder, model: {"pretrain": model, "output_path": "./exported"},
}


@pytest.fixture
def short_session(monkeypatch):
    """A chat user who sends one message and exits; servers that bind any free port and stop immediately."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\nexit\n"))
    monkeypatch.setattr(serve, "bind", lambda host, port, bind=serve.bind: bind(host, 0))
    monkeypatch.setattr(serve.RewardModelServer, "run", lambda self, sockets: None)
    monkeypatch.setattr(view_server, "bind", lambda port, bind=view_server.bind: bind(None))
    monkeypatch.setattr(view_server.Server, "run", lambda self, sockets: None)


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("short_session")
def test_every_flag_is_read_reported_or_rejected(name, tmp_path, models):
    command = name.split()[0]
    flags = RUNS[name](tmp_path, models())
    with recorded_reads() as read:
        run_command(command, flags)
    config = check(parse(COMMANDS[command], as_argv(flags), environ={}), lambda line: None)
    idle = {flag for _, flags in idle_flags(config, TABLE) for flag in flags}
    unread = flags_of(COMMANDS[command]).keys() - read
    elsewhere = READ_ELSEWHERE.get(name, set())
    assert sorted(flag for flag in unread - idle - elsewhere if not is_reported(config, flag)) == [], (
        "nothing reads these flags, and nothing reports that they have no effect: use them, delete them, or add a row"
        " in openrlhf/config/no_effect"
    )
    assert sorted((idle & read) - PASSED_ON) == [], "the table says that these flags do nothing, but code reads them"
    silent = sorted(flag for flag in idle if not is_reported(config, flag))
    assert silent == [], "the table has these flags, but giving one prints no line"
    assert {"dataloader_num_workers", "disable_fast_tokenizer"} & flags_of(COMMANDS[command]).keys() <= unread


def is_reported(config, flag):
    """True if giving the flag raises an error or prints a line, and either names the flag."""
    before, after = [], []
    check(config, before.append, given=())
    try:
        check(with_flag(config, flag), after.append, given={flag})
    except ConfigError as error:
        after.append(str(error))
    return any(f"--{flag}" in line for line in after if line not in before)


def with_flag(config, flag):
    item = flags_of(type(config))[flag]
    kind = without_none(item.type)
    if item.default not in EMPTY and kind is not bool:
        return config
    value = {bool: True, int: 1, float: 0.5, str: "x"}.get(kind)
    if get_origin(kind) is Literal:
        value = get_args(kind)[0]
    elif get_origin(kind) is tuple:
        value = (0.1, 0.2)
    return replace_flags(config, **{flag: value})


def test_conditional_flags_are_read_in_some_run():
    """Otherwise a row with a condition would hide a flag that nothing ever reads."""
    root = Path(openrlhf.__file__).parent
    silent = ("checks", "no_effect", "batch_table", "parser", "aliases", "flags", "check")
    files = [
        path for path in root.rglob("*.py") if not (path.is_relative_to(root / "config") and path_matches(path, silent))
    ]
    attributes = {
        node.attr
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    attributes |= {f"critic_{item.name}" for item in fields(OptimizerFlags)}  # the critic's section reads them by name
    always = {flag for row in ALWAYS for flag in row.flags if row.flags != ("use_ms",)} - {"zero_stage"}
    conditional = {flag for row in (*TABLE, *ON_CPU, *STEPS_ONLY, *WITHOUT_STEPS) for flag in row.flags} - always
    assert sorted(conditional - attributes) == []
    assert sorted(always & attributes) == []


def path_matches(path, words):
    return any(part.startswith(words) for part in (path.stem, path.parent.name))


@pytest.mark.parametrize("command", ["train_dpo", "train_kd"])
def test_offloading_and_liger_report_no_effect_on_a_cpu(command, tmp_path, models, capsys):
    config = parse(COMMANDS[command], as_argv(supervised(command, tmp_path, models())), environ={})
    offload = "teacher_offload" if command == "train_kd" else "ref_offload"
    explain_hardware(replace_flags(config, **{offload: True, "use_liger_kernel": True}), torch.device("cpu"))
    stderr = capsys.readouterr().err
    assert f"--{offload} has no effect on a CPU, where everything is in host memory" in stderr
    assert "--use_liger_kernel has no effect on a CPU: its kernels need a GPU" in stderr


def test_expert_flags_take_effect_for_mixture_models(tmp_path, models, capsys):
    for kind, lines in (("llama", 1), ("mixtral", 0)):
        flags = supervised("train_sft", tmp_path, models(kind)) | {"experts_implementation": "eager"}
        explain_hardware(parse(COMMANDS["train_sft"], as_argv(flags), environ={}), torch.device("cpu"))
        assert capsys.readouterr().err.count("--experts_implementation eager has no effect") == lines


@pytest.mark.slow(seconds=2)
def test_reward_model_flags_without_a_reward_model_are_reported(tmp_path, models, capsys):
    flags = rl_with_reward_model(tmp_path, models()) | {"prm_reduce": "mean", "step_rewards": True, "max_steps": 1}
    run_command("train_ppo", flags)
    stderr = capsys.readouterr().err
    assert "--step_rewards and --prm_reduce mean have no effect without a process reward model" in stderr
    run_command("train_prm", supervised("train_prm", tmp_path, models()))
    run_command("train_ppo", flags | {"reward_pretrain": "./train_prm", "normalize_reward": True})
    stderr = capsys.readouterr().err
    assert "--normalize_reward has no effect on process reward models, whose scores are probabilities" in stderr
    assert "without a process reward model" not in stderr


def test_the_table_names_flags_that_exist():
    for row in (*TABLE, *ON_CPU, *STEPS_ONLY, *WITHOUT_STEPS):
        commands = [command for command in COMMANDS.values() if issubclass(command, row.kinds)]
        known = {flag for command in commands for flag in flags_of(command)}
        assert set(row.flags) <= known, row
