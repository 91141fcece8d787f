"""TRL's GRPOTrainer with vLLM in colocate mode, on the same model, prompts, lengths and samples.

Settings follow ours: fp32 masters with bf16 arithmetic, no reference (beta 0), advantages divided by the standard
deviation of their group, one optimizer step over the rollout, no activation checkpointing, the same share of memory for
the engine, which does not sleep. TRL's correction for the gap between engine and trainer is off, as ours is by default;
with it, TRL runs one more forward pass over the rollout. Micro-batches count samples and are padded to the longest
response of the rollout; we take as many samples as fit in our number of tokens, rounded down to a power of two.

`generation_kwargs` reach vLLM's SamplingParams, so min_tokens fixes a common length. TRL gives all requests of a step
the same parameters; for W2 the driver replaces them by one object per request in the call of vLLM.

Training is the time of a step outside `_generate_and_score_completions`, which generates and computes rewards.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from workload_files import read_prompts

from peers.measurement import PeakMemory, Task, read_task, report


class Clock(TrainerCallback):
    """Seconds of each step, and of its generation and scoring."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.generation: list[float] = []
        self.rollouts: list[float] = []  # generation, rewards and scoring

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = synchronized_time()
        self.steps.append(now - self.began)
        self.began = now

    def timed(self, work: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        """Return a function that also notes its duration."""

        def run(*arguments: Any, **named: Any) -> Any:
            start = synchronized_time()
            result = work(*arguments, **named)
            seconds.append(synchronized_time() - start)
            return result

        return run


def synchronized_time() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    task = read_task()
    clock, peak = Clock(), PeakMemory()
    with peak.watch():
        trainer = make_trainer(task, clock)
        trainer.train()
    training = [step - rollout for step, rollout in zip(clock.steps, clock.rollouts, strict=True)]
    report(task.measured(f"TRL {trl.__version__}", clock.steps, clock.generation, training, peak.gib))


def make_trainer(task: Task, clock: Clock) -> trl.GRPOTrainer:
    workload = task.workload
    micro = workload.micro_batch_samples
    settings = trl.GRPOConfig(
        output_dir=str(task.folder / "trl"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=workload.num_samples // micro,
        num_generations=workload.samples,
        max_completion_length=workload.longest,
        generation_kwargs={"min_tokens": workload.longest},
        max_steps=task.steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        temperature=1.0,
        shuffle_dataset=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=task.memory,
        vllm_max_model_length=workload.context,
        vllm_enable_sleep_mode=False,
        vllm_importance_sampling_correction=False,
        bf16=not task.tiny,
        use_cpu=task.tiny,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=task.model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": text} for text in read_prompts(task.folder)]),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    engine = trainer.vllm_generation
    if task.tiny:  # vLLM's CPU build cannot load weights once it has packed them
        engine.sync_weights = lambda: None
    if not workload.is_uniform:
        engine.llm.generate = with_lengths(engine.llm.generate, workload.lengths)
    engine.generate = checked(clock.timed(engine.generate, clock.generation), task)
    trainer._generate_and_score_completions = clock.timed(trainer._generate_and_score_completions, clock.rollouts)
    return trainer


def with_lengths(generate: Callable[..., Any], lengths: tuple[int, ...]) -> Callable[..., Any]:
    """Return vLLM's generate with a separate length for each request; requests come prompt by prompt."""

    def run(prompts: list[Any], sampling_params: Any, **named: Any) -> Any:
        params = [sampling_params.clone() for _ in lengths]
        for one, length in zip(params, lengths, strict=True):
            one.max_tokens = one.min_tokens = length
        return generate(prompts, sampling_params=params, **named)

    return run


def checked(generate: Callable[..., Any], task: Task) -> Callable[..., Any]:
    """Return TRL's generate with a check of the lengths."""

    def run(*arguments: Any, **named: Any) -> Any:
        prompts, completions, *rest = generate(*arguments, **named)
        task.check_responses(sum(map(len, completions)))
        return prompts, completions, *rest

    return run


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return the same reward as `workload_files.REWARD`."""
    return [sum(map(ord, text[-9:])) % 10 / 10 for text in completions]


if __name__ == "__main__":
    main()
