"""Flags and steps shared by the pipelines; a step is an ordinary command, skipped if its output exists."""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

Run = Callable[[list[str]], None]
ALONE = [sys.executable, "-m"]
COMPLETE = ["--input_key", "input", "--output_key", "output", "--input_template", ""]  # rows with complete prompts


def arguments(description: str, *, iterations: int, samples: int) -> argparse.ArgumentParser:
    """Flags of a pipeline that trains the policy with a reward model."""
    parser = shared_arguments(description, samples=samples)
    parser.add_argument("--reward", required=True, help="reward model")
    parser.add_argument("--held_out", help="dataset with prompts for evaluation (default: no evaluation)")
    parser.add_argument("--iterations", type=int, default=iterations)
    parser.add_argument("--prompts_per_iteration", type=int, default=2048)
    return parser


def shared_arguments(description: str, *, samples: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", required=True, help="model that answers")
    parser.add_argument("--prompts", required=True, help="dataset with the prompts")
    parser.add_argument("--folder", type=Path, required=True, help="folder for all files")
    parser.add_argument("--samples", type=int, default=samples, help="answers per prompt")
    parser.add_argument("--engine", choices=["generate", "generate_vllm"], default="generate")
    parser.add_argument("--generate", default="", help="flags for generation, such as '--max_new_tokens 512'")
    parser.add_argument("--score", default="", help="flags for scoring")
    parser.add_argument("--train", default="", help="flags for training, such as '--learning_rate 5e-7'")
    parser.add_argument("--launcher", default=shlex.join(ALONE), help="such as 'deepspeed --module'")
    return parser


class Steps:
    """The commands of a pipeline, printed so that they can be run by hand."""

    def __init__(self, args: argparse.Namespace, run: Run | None = None) -> None:
        self.args = args
        self.run = run or self.launch
        args.folder.mkdir(parents=True, exist_ok=True)

    def launch(self, words: list[str]) -> None:
        """A single vLLM uses all devices, so it needs no launcher. A command that fails prints the reason itself."""
        launcher = ALONE if "generate_vllm" in words else shlex.split(self.args.launcher)
        code = subprocess.run([*launcher, f"openrlhf.cli.{words[0]}", *words[1:]], check=False).returncode
        if code:
            print(f"# openrlhf {words[0]} ended with exit code {code}; rerun the pipeline command to resume")
            sys.exit(code)

    def step(self, output: Path, command: str, *flags: object, source: Path | None = None) -> str:
        """Run a command unless its output exists; a step that was killed resumes or starts over.

        Output that is older than its source is rebuilt, because the pipeline's flags may have changed the rows.
        """
        words = [command, *map(str, flags)]
        if output.exists() and (source is None or source.stat().st_mtime_ns <= output.stat().st_mtime_ns):
            print(f"# {output} exists")
        else:
            print(f"$ openrlhf {shlex.join(words)}", flush=True)
            self.run(words)
        return str(output)

    def answers(self, output: Path, policy: str, prompts: str, *flags: object) -> str:
        given = ["--eval_task", self.args.engine, "--pretrain", policy, "--dataset", prompts, "--output_path", output]
        return self.step(output, "batch_inference", *given, *flags, *shlex.split(self.args.generate))

    def scored(self, output: Path, answers: str, *flags: object, reward: str | None = None) -> str:
        model = reward or self.args.reward
        given = ["--eval_task", "rm", "--pretrain", model, "--dataset", answers, "--output_path", output]
        flags = (*given, *flags, *shlex.split(self.args.score))
        return self.step(output, "batch_inference", *flags, source=Path(answers))

    def trained(self, folder: Path, command: str, *flags: object) -> str:
        """A model is complete once its config.json exists, because that is written last."""
        paths = ["--save_path", folder, "--ckpt_path", folder.with_name(f"{folder.name}_ckpt")]
        self.step(folder / "config.json", command, *paths, *flags, *shlex.split(self.args.train))
        return str(folder)

    def mean_reward(self, name: str, policy: str, condition: str | None = None) -> float | None:
        """Score one answer to each held-out prompt; the reward model reads the prompt without the condition."""
        if not self.args.held_out:
            return None
        wish = [] if condition is None else ["--enable_csft", "--csft_prompt", condition]
        answers = self.answers(self.args.folder / f"{name}_answers.jsonl", policy, self.args.held_out, *wish)
        if condition is not None:
            rows = [{**row, "input": row["input"].removesuffix(f" {condition} ")} for row in read(answers)]
            write(Path(answers), rows)
        mean = fmean(row["reward"] for row in read(self.scored(self.args.folder / f"{name}_scored.jsonl", answers)))
        print(f"held-out reward {name}: {mean:.3f}")
        return mean


def read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Leave a file that already holds these rows untouched: a stopped step resumes only if its data did not change."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return str(path)
