"""Run every script of examples/scripts at tiny scale on this machine, and print what ran and for how long.

    python tools/run_examples.py                      # make examples
    python tools/run_examples.py train_sft train_rm   # some of them

A script gets its model, data and sizes through the variables that it documents, and is not changed. Scripts for Slurm
run with stand-ins for srun and scontrol that know only this node. Scripts for Docker get a stand-in that prints its
arguments. A script that only calls another one runs with --dry_run.
"""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tiny_examples import make_toys

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "scripts"
WATCHDOG = 600  # seconds for one script; each should take less than a quarter of this
# Variables of every script: {toys} is the folder of models and data, {work} the script's own, {port} a free port.
SETTING = """
MODEL={toys}/llama REWARD_MODEL={toys}/reward TEACHER={toys}/llama PROMPTS={toys}/prompts.jsonl PLACEHOLDER=#
MAX_SAMPLES=8 MAX_LEN=128 TRAIN_BATCH=4 MICRO_BATCH=2 LAUNCHER='deepspeed --master_port {port} --num_gpus 1 --module'
PROMPT_LEN=64 ANSWER_LEN=8 ROLLOUT_BATCH=4 SAMPLES=2 MICRO_ROLLOUT_BATCH=4 ITERATIONS=1 PROMPTS_PER_ITERATION=4
ACTOR_NODES=1 ACTOR_GPUS=1 CRITIC_NODES=1 CRITIC_GPUS=1 ENGINES=1 ENGINE_TP=1 GPUS_PER_NODE=1
SYSTEM_PROMPT=help TURNS=2 OVERLONG=4 SAVE_PATH={work}/model CKPT_PATH={work}/ckpt SCRIPTS={scripts}
PORT={port} MASTER_PORT={port} RAY_PORT={port} RAY_TMPDIR={ray} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={ray}/token
SLURM_JOB_NODELIST=127.0.0.1 SLURM_NNODES=1 SLURM_JOB_ID=1 WANDB_MODE=offline HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1
"""
TWO = "LAUNCHER='deepspeed --master_port {port} --num_gpus 2 --module'"
ANSWERS, PAIRS, STEPS = (f"DATASET={{toys}}/{name}.jsonl" for name in ("answers", "pairs", "steps"))
TOY_REWARD = "REWARD_FUNC={toys}/reward.py"
STANDS_IN = {
    "scontrol": 'echo "$SLURM_JOB_NODELIST"',
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "docker": 'echo docker "$@"',
}
UNIVERSAL = """
"$SCRIPTS/train_sft.sh" --zero_stage 3 --save_steps 1 --ckpt_path ckpt --max_steps 1
"$SCRIPTS/ckpt_ds_zero_to_universal.sh" ckpt --num_extract_workers 1
LAUNCHER="python3 -m" "$SCRIPTS/train_sft.sh" --zero_stage 3 --ckpt_path ckpt --load_checkpoint \
    --use_ds_universal_ckpt
"""
SERVE = """
"$SCRIPTS/serve_remote_rm.sh" &
trap 'kill $!; wait' EXIT
curl --silent --show-error --fail --retry 100 --retry-delay 1 --retry-connrefused \
    --header 'Content-Type: application/json' --data '{"query": ["abc"], "prompts": ["a"], "labels": [""]}' \
    "http://127.0.0.1:$PORT/get_reward"
"""
AS_A_JOB = """
head -c 32 /dev/urandom | base64 --wrap 0 > "$RAY_AUTH_TOKEN_PATH"
ray start --head --port 0 --dashboard-port "$PORT" --num-gpus 0 --disable-usage-stats --block > ray.log 2>&1 &
trap 'kill $!; wait' EXIT
for _ in {1..50}; do  # the cluster accepts jobs only some time after it answers
    if ray job submit --address "http://127.0.0.1:$PORT" -- true; then break; fi
    sleep 1
done > waiting.log 2>&1
RAY_ADDRESS="http://127.0.0.1:$PORT" "$SCRIPTS/$JOB.sh"
"""


@dataclass(frozen=True)
class Example:
    """How one script runs here; `program` is Bash code for scripts that need more than a call."""

    name: str
    what: str
    variables: str = ""
    flags: str = ""
    program: str = ""
    trains: bool = True

    @property
    def command(self) -> str:
        return self.program or f'"$SCRIPTS/{self.name}.sh" {self.flags}'


def on_ray(name: str, what: str, variables: str = "") -> Example:
    return Example(name, f"{what}; Ray, DeepSpeed, vLLM", variables, "--runtime ray")


def as_a_job(name: str, of: str) -> Example:
    return Example(name, f"{of}, as a job", f"JOB={of}", program=AS_A_JOB)


def other_name(name: str, of: str, variables: str = "") -> Example:
    return Example(name, f"calls {of}: --dry_run", variables, "--dry_run", trains=False)


EXAMPLES = (
    Example("train_continue_pretrain_llama", "continued pre-training", ANSWERS),
    Example("train_sft", "SFT, 2 processes", f"{ANSWERS} {TWO}"),
    Example("train_sft_llama_tensor_parallelism", "SFT, matrices split over 2 processes", f"{ANSWERS} {TWO}"),
    Example("train_sft_mixtral_lora", "SFT of an adapter on experts", f"{ANSWERS} MODEL={{toys}}/mixtral"),
    Example("train_sft_moe", "SFT of experts, 2 processes", f"{ANSWERS} {TWO} MODEL={{toys}}/qwen_moe"),
    Example("train_rm", "reward model, 2 processes", f"{PAIRS} {TWO}"),
    Example("train_dpo_llama", "DPO", PAIRS),
    Example("train_dpo_ring_llama", "DPO, 2 processes per sequence", f"{PAIRS} {TWO}"),
    Example("train_kto_llama", "KTO", ANSWERS),
    Example("train_knowledge_distillation", "distillation", ANSWERS),
    Example("train_prm_mistral", "process reward model", f"{STEPS} MODEL={{toys}}/mistral"),
    Example("train_iterative_dpo", "vLLM, scoring, DPO"),
    Example("train_rejection_sampling_llama", "vLLM, scoring, SFT"),
    Example("train_prm_best_of_n", "process reward model, vLLM, scoring", f"{STEPS} BASE={{toys}}/mistral"),
    Example("train_conditional", "scoring, SFT; Transformers generates", "ENGINE=generate"),
    Example("train_ppo_llama", "PPO on the devices of 2 launched processes, Transformers generates", TWO),
    on_ray("train_ppo_llama_ray", "PPO, each model on its own devices"),
    on_ray("train_ppo_llama_ray_34b", "the same, optimizer in host memory"),
    on_ray("train_ppo_llama_ray_70b", "the same, optimizer in host memory"),
    on_ray("train_reinforce_llama_ray", "REINFORCE++, each model on its own devices"),
    on_ray("train_ppo_ray_hybrid_engine", "PPO on 2 shared devices", "ACTOR_GPUS=2 ENGINES=2"),
    on_ray("train_reinforce_llama_ray_hybrid_engine", "REINFORCE++ on shared devices"),
    on_ray("train_ppo_with_reward_fn", "PPO with a reward function"),
    on_ray("train_reinforce_baseline_hybrid_engine", "REINFORCE++-baseline with a reward function", TOY_REWARD),
    on_ray("train_dapo_ray_hybrid_engine", "DAPO", TOY_REWARD),
    on_ray("train_prorlv2_math_hybrid_engine", "ProRL v2, another reward function", TOY_REWARD),
    on_ray("train_reinforce_baseline_llama_ray_async", "REINFORCE++-baseline, async"),
    on_ray("train_reinforce_baseline_ray_agent_async", "an agent with a tool, async"),
    as_a_job("ray_job_submit", "train_ppo_ray_hybrid_engine"),
    as_a_job("ray_job_submit_agent", "train_reinforce_baseline_ray_agent_async"),
    Example("train_llama_slurm", "SFT through torchrun; stand-in for srun", ANSWERS),
    Example("train_ppo_ray_slurm", "PPO on a Ray that it starts; stand-in for srun"),
    Example("ckpt_ds_zero_to_universal", "2 processes save, 1 resumes", f"{ANSWERS} {TWO}", program=UNIVERSAL),
    Example("serve_remote_rm", "serves, scores one text", program=SERVE, trains=False),
    Example(
        "interactive_chat_llama",
        "one question",
        program='printf "hello\\nexit\\n" | "$SCRIPTS/interactive_chat_llama.sh" "$MODEL"',
        trains=False,
    ),
    other_name("train_sft_llama", "train_sft", ANSWERS),
    other_name("train_rm_llama", "train_rm", PAIRS),
    other_name("train_ppo_llama_ray_hybrid_engine", "train_ppo_ray_hybrid_engine"),
    other_name("train_ppo_llama_with_reward_fn", "train_ppo_with_reward_fn"),
    other_name("train_reinforce_baseline_llama_ray_agent_async", "train_reinforce_baseline_ray_agent_async"),
    other_name("train_ppo_llama_ray_slurm", "train_ppo_ray_slurm"),
    Example("train_iterative_dpo_llama", "calls train_iterative_dpo: --help", flags="--help", trains=False),
    Example("train_conditional_llama", "calls train_conditional: --help", flags="--help", trains=False),
    Example("docker_run", "stand-in for docker prints its arguments", trains=False),
)
ONLY_READ = ("build_openrlhf", "nvidia_docker_install")  # these install software; only shellcheck reads them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scripts, without .sh (default: all)")
    parser.add_argument("--folder", type=Path, help="folder for all files, which is kept (default: a new one)")
    args = parser.parse_args()
    known = {example.name: example for example in EXAMPLES}
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no such example: {', '.join(unknown)}")
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="examples-"))).resolve()
    make_toys(folder / "toys")
    make_stand_ins(folder / "bin")
    width = max(map(len, known)) + 2
    wide = max(len(example.what) for example in EXAMPLES) + 1
    failed = []
    for name in args.names or known:
        began = time.monotonic()
        wrong = run(known[name], folder)
        result = f"FAILED: {wrong}" if wrong else "ok"
        print(f"{name:{width}}{time.monotonic() - began:6.0f} s  {known[name].what:{wide}} {result}", flush=True)
        failed += [name] if wrong else []
    print(f"everything is in {folder}")
    sys.exit(1 if failed else 0)


def make_stand_ins(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    programs = dict(STANDS_IN)
    deepspeed = shlex.quote(str(Path(sys.executable).with_name("deepspeed")))
    if deepspeed.startswith("'"):  # its first line names an interpreter, whose path must not contain a space
        programs["deepspeed"] = f'exec python3 {deepspeed} "$@"'
    for name, body in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)


def run(example: Example, folder: Path) -> str:
    """Run a script; return what went wrong, or an empty string."""
    work = folder / example.name
    work.mkdir()
    with tempfile.TemporaryDirectory(
        prefix="or", dir="/tmp", ignore_cleanup_errors=True
    ) as ray:  # a short path for sockets
        places = {"toys": folder / "toys", "work": work, "scripts": SCRIPTS, "ray": ray, "port": free_port()}
        quoted = {name: shlex.quote(str(place)) for name, place in places.items()}
        words = shlex.split(f"{SETTING} {example.variables}".format(**quoted))
        given = dict(word.split("=", 1) for word in words)
        with (work / "log").open("w", encoding="utf-8") as log:
            code = execute(example.command, surroundings(folder) | given, work, log)
    if code:
        return f"exit {code}: {work}/log"
    if example.trains and not any(path.stat().st_size for path in work.rglob("metrics.jsonl")):
        return f"no metrics: {work}/log"
    return ""


def surroundings(folder: Path) -> dict[str, str]:
    """Return this environment with stand-ins and this interpreter first on PATH, without variables of another Ray."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    return kept | {"PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


def execute(command: str, environment: dict[str, str], work: Path, log: object) -> int:
    """Return the exit code; kill all processes that the script left."""
    script = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", command],
        env=environment,
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=log,  # type: ignore[arg-type]
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return script.wait(timeout=WATCHDOG)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
