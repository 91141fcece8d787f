"""Test a run on its first rows, before any model loads.

As in training, the rows are formatted, tokenised and, in reinforcement learning, answered: the reward function or agent
gets right and wrong made-up answers. So mistakes in data, templates and reward code show up within seconds. --dry_run
runs only this test; every RL run also calls `build_tested_executor`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import try_to_load_from_cache

from openrlhf.agents.branches import last_of_episodes
from openrlhf.agents.build import build_executor
from openrlhf.agents.executor import GroupExecutor, GroupResult, sample_name, shorten
from openrlhf.agents.overrides import EngineLogProbs
from openrlhf.config.checks.paths import split_revision
from openrlhf.config.commands import RLConfig, SupervisedConfig
from openrlhf.config.in_memory import describe, is_in_memory
from openrlhf.config.runtime import compares_engine, critic_model, generates_in_lockstep, resolve_runtime, uses_vllm
from openrlhf.config.sections.data import split_names
from openrlhf.config.sections.rl import RewardFlags
from openrlhf.data.preview_text import describe_row
from openrlhf.data.prompts import load_prompts
from openrlhf.data.supervised import read_datasets, show_data
from openrlhf.errors import RewardError, RolloutError, counted
from openrlhf.event_loop import run_async
from openrlhf.models.load import load_tokenizer
from openrlhf.monitor import say
from openrlhf.rl.rollouts import sampling
from openrlhf.training.optim import schedule
from openrlhf.training.preflight import check_models
from openrlhf.training.processes import choose_device
from openrlhf.types import Completion, Prompt, Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_ROWS = 8
MADE_UP = "a made-up answer"
HANGING = 0.9  # share of --reward_timeout without any event after which a reward counts as hung


def run(config: RLConfig | SupervisedConfig) -> None:
    """Test everything that needs no model weights, without downloading anything."""
    if not (isinstance(config, RLConfig) and resolve_runtime(config) == "ray"):  # on Ray, the workers have the devices
        choose_device(config.model.device, config.sharding.local_rank)  # rejects --device cuda without a GPU
    if isinstance(config, RLConfig):
        names, critic = (config.prompts.prompt_data, config.prompts.eval_dataset), critic_model(config)
    else:
        names, critic = (config.data.dataset, config.data.eval_dataset), None
    datasets = [name for given in names for name in split_names(given) if not is_on_disk(name)]
    missing = ([] if tokenizer_is_here(str(config.model.pretrain)) else [str(config.model.pretrain)]) + datasets
    if missing:
        say(f"no rows were tested: {', '.join(missing)} must be downloaded first")
        return
    if critic is None or tokenizer_is_here(critic):
        check_models(config)
    tokenizer = load_tokenizer(str(config.model.pretrain), config.model)
    if isinstance(config, RLConfig):
        try_rl(config, tokenizer)
    else:
        try_supervised(config, tokenizer)
    say("dry run: nothing was trained or written")


def is_on_disk(name: str) -> bool:
    """Return whether a local path exists, with or without the part after an `@`; objects are always available."""
    return is_in_memory(name) or any(Path(path).expanduser().exists() for path in (name, name.partition("@")[0]))


def tokenizer_is_here(name: str) -> bool:
    """Return whether the tokenizer is on disk or in the Hugging Face cache."""
    if is_on_disk(name):
        return True
    repository, revision = split_revision(name)
    return isinstance(try_to_load_from_cache(repository, "tokenizer_config.json", revision=revision), str)


def try_supervised(config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Load the first rows of the training and evaluation datasets and show the first one; hold out none of them."""
    flags, data = config.optimizer, config.data
    schedule(flags.lr_scheduler, warmup_ratio=flags.lr_warmup_ratio, total_steps=1, min_lr_ratio=flags.min_lr_ratio)
    most = FIRST_ROWS if data.max_samples is None else min(FIRST_ROWS, data.max_samples)
    config = replace(config, data=replace(data, max_samples=most, eval_size=None))
    show_data(config, *read_datasets(config, tokenizer, eval_samples=FIRST_ROWS), tokenizer)


def try_rl(config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Load the first prompts of the training and evaluation datasets and compute rewards for made-up answers."""
    flags = config.prompts
    most = FIRST_ROWS if flags.max_samples is None else min(FIRST_ROWS, flags.max_samples)
    config = replace(config, prompts=replace(flags, max_samples=most, eval_size=None))
    prompts, _ = load_prompts(config, tokenizer)
    run_async(build_tested_executor(config, tokenizer, prompts).close())


def build_tested_executor(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> GroupExecutor:
    """Build the executor of a run and test it on made-up answers to the first prompts; if that fails, close it."""
    flags = config.optimizer
    for name in (flags.lr_scheduler, flags.critic_lr_scheduler or flags.lr_scheduler):  # rejects invalid flags
        schedule(name, warmup_ratio=flags.lr_warmup_ratio, total_steps=1, min_lr_ratio=flags.min_lr_ratio)
    say(describe_row(prompts[0], tokenizer))
    whole = config.rollout.whole_log_probs
    executor = build_executor(
        config.rewards,
        tokenizer,
        context_length=config.rollout.context_length,
        trust_remote_code=config.model.trust_remote_code,
        template=config.template,
        log_probs=EngineLogProbs(compares_engine(config), whole, before_temperature=whole and uses_vllm(config)),
        in_lockstep=generates_in_lockstep(config),
    )
    if config.rollout.replay:  # recorded rollouts already have rewards
        return executor
    try:
        trials = make_trials(config, prompts[:FIRST_ROWS])
        tried = run_async(try_answers(config, tokenizer, trials, executor))
    except BaseException:
        run_async(executor.close())
        raise
    explain(tried, tokenizer)
    return executor


class MadeUpSession:
    """Session that returns made-up answers, without an engine.

    The first answer is `text`. Later answers are as long as allowed, so that a multi-turn episode ends soon.
    """

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        self.asked = 0
        self.asked_at = time.monotonic()  # time of the last request, or of the start

    async def generate(self, request: Request, *, last: bool = False) -> Completion:
        self.asked_at = time.monotonic()
        most = request.params.max_tokens
        ids = list(islice(cycle(self.ids) if self.asked else self.ids, most))
        self.asked += 1
        reason = "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        return Completion.of(ids, [0.0] * len(ids), text_of(ids, self.tokenizer), reason, version=0)

    def close(self) -> None:
        """Do nothing: there is no request to cancel."""


@dataclass(frozen=True)
class Trial:
    """A prompt, and made-up answers for the samples of its group; one of them may be right."""

    prompt: Prompt
    answers: tuple[str, ...]
    right: str | None  # None if a right answer is not known


def make_trials(config: RLConfig, prompts: Sequence[Prompt]) -> list[Trial]:
    """Make up right and wrong answers to each prompt; a label that is text is assumed to be a right answer.

    Groups have as many samples as in training, because a reward function may compare them; with one sample per
    group, each prompt gets two groups. An agent plays its samples one by one, so one right and one wrong answer are
    enough.
    """
    samples = 2 if config.rewards.agent_func_path else config.rollout.n_samples_per_prompt
    trials: list[Trial] = []
    for prompt in prompts:
        right = prompt.label if isinstance(prompt.label, str) and prompt.label else None
        answers = [MADE_UP, *(f"{MADE_UP} {number}" for number in range(1, samples))]
        if right is not None:
            answers = [right, *answers][: max(samples, 2)]
        for place in range(0, len(answers), samples):
            trials.append(Trial(prompt, tuple(answers[place : place + samples]), right))
    return trials


async def try_answers(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase, trials: Sequence[Trial], executor: GroupExecutor
) -> list[tuple[Trial, GroupResult]]:
    """Run the trials through the executor, all within one --reward_timeout; return those that ended."""
    rewards = config.rewards
    timeout = rewards.reward_timeout if rewards.agent_func_path or rewards.remote_rm_url else math.inf
    sessions: list[MadeUpSession] = []
    tasks: list[asyncio.Task[GroupResult]] = []
    for trial in trials:
        own = [MadeUpSession(text, tokenizer) for text in trial.answers]
        sessions += own
        flags = replace(config.rollout, n_samples_per_prompt=len(own))
        params = sampling(trial.prompt, flags, config.batches.seed)
        tasks.append(asyncio.create_task(executor.run_group(trial.prompt, params, own)))
    unfinished = set(tasks)
    last_event = time.monotonic()
    deadline = last_event + timeout
    try:
        while unfinished and (left := deadline - time.monotonic()) > 0:
            ended, unfinished = await asyncio.wait(unfinished, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            last_event = time.monotonic() if ended else last_event
    finally:  # kill hanging user code instead of waiting for the timeouts and retries of each sample
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # If nothing happened for nearly the whole time, the first unfinished prompt hangs; the others may have waited for
    # its worker process. Otherwise rewards are only slow.
    last_event = max(last_event, *(session.asked_at for session in sessions))
    hangs = bool(unfinished) and deadline - last_event > HANGING * timeout
    tried: list[tuple[Trial, GroupResult]] = []
    for trial, task in zip(trials, tasks, strict=True):  # raise the first error in row order, not the first in time
        error = None if task in unfinished else task.exception()
        if task in unfinished and hangs:
            hangs = False
            message = f"{source_of(rewards)} did not return within {timeout:g} s (--reward_timeout)"
            fix = "a time limit in the reward's code, or a larger --reward_timeout"
            error = RewardError(f"{message}, for {sample_name(trial.prompt)}", try_this=fix)
            if rewards.on_reward_error == "skip":
                tried.append((trial, GroupResult([], [error] * len(trial.answers))))
                continue
        if isinstance(error, RewardError | RolloutError):
            message = f"in the test with made-up answers before training: {error.message}"
            raise type(error)(message, try_this=error.try_this) from error
        if error is not None:
            raise error
        if task not in unfinished:
            tried.append((trial, task.result()))
    if len(tried) < len(tasks):
        ended, total = num_prompts(trial for trial, _ in tried), num_prompts(trials)
        say(f"the reward test ended after {timeout:g} s (--reward_timeout) with {ended} of {total} prompts")
    return tried


def num_prompts(trials: Iterable[Trial]) -> int:
    return len({trial.prompt.index for trial in trials})


def source_of(rewards: RewardFlags) -> str:
    """Name the user's code or server that gives the rewards."""
    agent, reward = rewards.agent_func_path, rewards.remote_rm_url
    if agent:
        return f"agent={describe(agent)}" if is_in_memory(agent) else f"the agent in {agent}"
    if reward and is_in_memory(reward):
        return f"reward={describe(reward)}"
    return f"reward_func in {rewards.reward_file}" if rewards.reward_file else "a reward server (--remote_rm_url)"


def explain(tried: Sequence[tuple[Trial, GroupResult]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print failures and the range of the rewards; rewards of reward models are not known yet."""
    number = num_prompts(trial for trial, _ in tried)
    prompts = "prompt" if number == 1 else f"{number} prompts"
    failures = [failure for _, result in tried for failure in result.failures]
    if failures:
        say(
            f"{counted(len(failures), 'made-up answer')} to the first {prompts} failed, and such samples are dropped"
            f" (--on_reward_error skip); the first: {failures[0]}"
        )
    made = [item for _, result in tried for item in result.trajectories if not math.isnan(item.reward)]
    if not made:
        return
    rewards, first = [item.reward for item in made], made[0]
    response = text_of(first.input_ids[int(first.action_mask.argmax()) :], tokenizer)
    extremes = dict.fromkeys(f"{reward:g}" for reward in (min(rewards), max(rewards)))
    say(
        f"rewards of made-up answers to the first {prompts} are {' to '.join(extremes)}; {shorten(response)} gets"
        f" {rewards[0]:g}"
    )
    # Rewards of right and wrong answers by prompt; with failures it is not known which samples are missing.
    right: dict[int, set[float]] = {}
    wrong: dict[int, set[float]] = {}
    for trial, result in tried:
        if trial.right is not None and not result.failures:
            for answer, item in zip(trial.answers, last_of_episodes(result.trajectories), strict=True):
                side = right if answer == trial.right else wrong
                side.setdefault(trial.prompt.index, set()).add(item.reward)
    if right and right == wrong and all(len(found) == 1 for found in right.values()):
        say(
            "right answers (the labels) and wrong answers to these prompts get the same rewards. Try: check that the"
            " reward uses the label and accepts it as an answer; ignore this if it expects another format or does"
            " not use labels"
        )


def text_of(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode([int(token) for token in ids]))
