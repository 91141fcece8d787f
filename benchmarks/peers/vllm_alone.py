"""vLLM's own `LLM.generate` for the rollout of a workload, with log-probs: the best that its engine reaches in one
process.
"""

import time

import vllm
from transformers import AutoTokenizer
from workload_files import read_prompts

from peers.measurement import PeakMemory, Task, read_task, report


def main() -> None:
    task = read_task()
    peak = PeakMemory()
    with peak.watch():
        seconds = generate(task)
    report(task.measured(f"vLLM {vllm.__version__}, generation alone", seconds, seconds, peak_gib=peak.gib))


def generate(task: Task) -> list[float]:
    """Generate a rollout per step; return the seconds of each."""
    workload = task.workload
    engine = vllm.LLM(
        task.model,
        dtype="float32" if task.tiny else "bfloat16",
        max_model_len=workload.context,
        gpu_memory_utilization=task.memory,
        max_num_seqs=workload.num_samples,
        enable_prefix_caching=True,
        enforce_eager=task.tiny,
        logprobs_mode="processed_logprobs",
    )
    params = [
        vllm.SamplingParams(max_tokens=length, min_tokens=length, temperature=1.0, logprobs=0, detokenize=False)
        for length in workload.lengths
    ]
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    texts = read_prompts(task.folder)
    seconds = []
    for step in range(task.steps):
        ids = [tokenizer(text)["input_ids"] for text in texts[step * workload.prompts : (step + 1) * workload.prompts]]
        prompts = [{"prompt_token_ids": row} for row in ids for _ in range(workload.samples)]
        start = time.perf_counter()
        answers = engine.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        task.check_responses(sum(len(answer.outputs[0].token_ids) for answer in answers))
    return seconds


if __name__ == "__main__":
    main()
