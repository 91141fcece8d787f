"""Compare the in-process engine with `model.generate`: uneven prompts and responses, greedy, equal tokens.

    python benchmarks/engine.py
    python benchmarks/engine.py --model DIR --requests 64 --longest_response 512       (on a GPU if there is one)
    python benchmarks/engine.py --hidden 1536 --layers 28 --dtype bfloat16 --rows 512 --requests 512
    python benchmarks/engine.py --rollout

Each request has its own response length. `generate` gets them in batches of `--rows` in order of arrival, left-padded,
as a script would call it; a batch runs until its longest response has ended. The engine gives the slot of a finished
row to the next request. "lengths foreseen" is `generate` with requests sorted by response length, which cannot be known
in advance: it is the best that batches can do. The last line is Transformers' own continuous batching, started and
warmed up before timing begins, with log-probs, which training needs.

With --rollout, only the engine runs, as it does in training: temperature 1 and a seed for each request. All responses
have the longest length, so a step has as many rows as there are slots.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.utils.logging import set_verbosity_error

from openrlhf.models.forward import Network
from openrlhf.rollout.hf import HFEngine
from openrlhf.types import Request, SamplingParams

Generated = list[tuple[int, ...]]
NO_END = -1  # responses end only at their length, so that both sides do the same work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder (default: a Llama of the sizes below)")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--key_heads", type=int, help="default: as many as heads, which have 64 dimensions")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 16], help="sequences at a time, both sides")
    parser.add_argument("--longest_prompt", type=int, default=64)
    parser.add_argument("--longest_response", type=int, default=128)
    parser.add_argument("--dtype", default="float32", help="with bfloat16, rounding may change responses")
    parser.add_argument("--repeats", type=int, default=2, help="number of runs; the fastest counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollout", action="store_true", help="the engine alone, sampling long responses")
    args = parser.parse_args()
    set_verbosity_error()
    model, tokenizer = build(args)
    requests = make_requests(args, model.config.vocab_size)
    warm(model, tokenizer, requests)
    for rows in args.rows:
        compare(args, rows, model, tokenizer, requests)


def compare(
    args: argparse.Namespace,
    rows: int,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    requests: Sequence[Request],
) -> None:
    by_length = sorted(range(len(requests)), key=lambda place: requests[place].params.max_tokens)
    ours = timed(lambda: run_engine(model, tokenizer, requests, rows), args.repeats)
    report = Report(rows, model, *ours)
    report.add("openrlhf engine", *ours)
    if args.rollout:
        report.add_step(args.longest_response)
        return
    report.add(
        "generate, in order of arrival",
        *timed(lambda: run_generate(model, requests, range(len(requests)), rows), args.repeats),
    )
    if rows < len(requests):
        foreseen = timed(lambda: run_generate(model, requests, by_length, rows), args.repeats)
        report.add("generate, lengths foreseen", *foreseen)
    with continuous_batching(model, rows) as manager:
        run_manager(manager, requests)
        report.add("continuous batching", *timed(lambda: run_manager(manager, requests), args.repeats))
    report.end()


def build(args: argparse.Namespace) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    else:
        heads = max(1, args.hidden // 64)
        config = LlamaConfig(
            vocab_size=args.vocabulary,
            hidden_size=args.hidden,
            intermediate_size=3 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=heads,
            num_key_value_heads=args.key_heads or heads,
            initializer_range=0.1,  # spreads the logits, so that rounding does not change the choice
        )
        with torch.device(device):
            model = LlamaForCausalLM(config)
        tokenizer = plain_tokenizer(args.vocabulary)
    model.generation_config.eos_token_id = NO_END
    tokenizer.eos_token = None
    return model.to(device, dtype).eval(), tokenizer


def plain_tokenizer(size: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


def make_requests(args: argparse.Namespace, vocabulary: int) -> list[Request]:
    """Make requests with response lengths as uneven as a policy's: most are short, a few reach the limit."""
    chance = random.Random(args.seed)
    requests = []
    for number in range(args.requests):
        prompt = tuple(chance.randrange(4, vocabulary) for _ in range(chance.randint(4, args.longest_prompt)))
        length = min(args.longest_response, max(4, int(chance.expovariate(4 / args.longest_response))))
        params = SamplingParams(max_tokens=length, temperature=0.0)
        if args.rollout:
            params = SamplingParams(max_tokens=args.longest_response, seed=number)
        requests.append(Request(prompt, params))
    return requests


def run_engine(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, requests: Sequence[Request], rows: int
) -> Generated:
    engine = HFEngine(Network(model), tokenizer, max_rows=rows)
    return [tuple(completion.token_ids.tolist()) for completion in engine.complete(requests)]


@torch.no_grad()
def run_generate(model: LlamaForCausalLM, requests: Sequence[Request], order: Sequence[int], rows: int) -> Generated:
    """Run `generate` on batches in this order; cut each response at its own length."""
    found: dict[int, tuple[int, ...]] = {}
    for start in range(0, len(order), rows):
        places = order[start : start + rows]
        longest = max(len(requests[place].prompt_token_ids) for place in places)
        ids = torch.zeros(len(places), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, place in enumerate(places):
            prompt = requests[place].prompt_token_ids
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        whole = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max(requests[place].params.max_tokens for place in places),
            do_sample=False,
            pad_token_id=0,
        )
        for place, tokens in zip(places, whole[:, longest:].tolist(), strict=True):
            found[place] = tuple(tokens[: requests[place].params.max_tokens])
    return [found[place] for place in range(len(requests))]


@contextmanager
def continuous_batching(model: LlamaForCausalLM, rows: int) -> Iterator[ContinuousBatchingManager]:
    """Run Transformers' own continuous batching with defaults, except the number of rows and the share of memory."""
    asked = GenerationConfig(do_sample=False, eos_token_id=NO_END, pad_token_id=0)
    settings = ContinuousBatchingConfig(max_requests_per_batch=rows, return_logprobs=True, max_memory_percent=0.4)
    before = model.config._attn_implementation
    with model.continuous_batching_context_manager(asked, continuous_batching_config=settings) as manager:
        yield manager
    model.set_attn_implementation(before)


def run_manager(manager: ContinuousBatchingManager, requests: Sequence[Request]) -> Generated:
    names = [
        manager.add_request(list(request.prompt_token_ids), max_new_tokens=request.params.max_tokens)
        for request in requests
    ]
    found: dict[str, tuple[int, ...]] = {}
    while len(found) < len(requests):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise SystemExit("continuous batching stopped before it finished")
        if result is not None and result.is_finished():
            if result.error is not None:
                raise SystemExit(f"continuous batching: {result.error}")
            found[result.request_id] = tuple(result.generated_tokens)
    return [found[name] for name in names]


def warm(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, requests: Sequence[Request]) -> None:
    """Run everything that happens once per process before timing begins."""
    few = requests if torch.cuda.is_available() else requests[:2]
    run_generate(model, few, range(len(few)), len(few))
    run_engine(model, tokenizer, few, len(few))


def timed(way: Callable[[], Generated], repeats: int) -> tuple[Generated, float]:
    """Return the last answer and the shortest time."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        generated = way()
        seconds.append(time.perf_counter() - started)
    return generated, min(seconds)


class Report:
    """Print a line for each method as soon as it is measured, relative to ours."""

    def __init__(self, rows: int, model: LlamaForCausalLM, ours: Generated, seconds: float) -> None:
        self.rows, self.ours, self.seconds = rows, ours, seconds
        self.tokens = sum(map(len, ours))
        self.exact = model.dtype == torch.float32
        self.different = 0
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"\n{len(ours)} requests, {rows} at a time, {parameters / 1e6:.1f}M parameters on {model.device}, "
            f"{torch.get_num_threads()} threads\nresponses of {min(map(len, ours))} to {max(map(len, ours))} tokens, "
            f"{self.tokens} in all\n"
        )
        print(f"{'':<28}{'seconds':>9}{'tokens/s':>10}{'time / ours':>13}{'equal responses':>17}")

    def add(self, name: str, generated: Generated, seconds: float) -> None:
        equal = sum(one == other for one, other in zip(generated, self.ours, strict=True))
        self.different += equal < len(self.ours)
        speed, relative = self.tokens / seconds, seconds / self.seconds
        print(f"{name:<28}{seconds:>9.2f}{speed:>10.0f}{relative:>12.2f}x{equal:>12}/{len(self.ours)}", flush=True)

    def add_step(self, length: int) -> None:
        """Print our engine's time per step; every response must have this length."""
        steps = -(-len(self.ours) // self.rows) * length
        print(f"{1000 * self.seconds / steps:.1f} ms a step, including prefill")
        if torch.cuda.is_available():
            print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")

    def end(self) -> None:
        if self.different and self.exact:
            raise SystemExit(f"{self.different} methods gave other tokens: rounding of near-equal logits, or a bug")


if __name__ == "__main__":
    main()
