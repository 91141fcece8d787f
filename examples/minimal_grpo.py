"""GRPO from beginning to end on one page: a small model learns to sort three digits, on a laptop CPU in half a minute.

    python examples/minimal_grpo.py

    483>348.      the prompt is "483>", a right answer "348" and the token that ends it

A Llama with one token per character is built on the spot. A warm-up shows it the form of an answer, the digits of the
prompt in any order; to sort them it learns from the reward alone: 1 for the sorted digits, 0 for anything else.
Held-out items are never trained on.

The losses are those of `openrlhf train_ppo`, from `openrlhf.algo`; everything else is plain torch and transformers.
Left out, and what the package adds: a reference model and its KL, the critic, an engine with continuous batching
(all prompts here have one length, so nothing is padded at the left), micro-batches and packing, rollouts that overlap
with training, multi-turn agents, reward processes with deadlines, checkpoints, logs, more than one device.
"""

import argparse
import random
import time
from itertools import product

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers.utils.logging import set_verbosity_error

from openrlhf.algo.policy_loss import PolicySettings, policy_loss
from openrlhf.algo.shaping import group_norm
from openrlhf.algo.token_loss import sft_loss

CHARACTERS = "0123456789>."  # "." ends an answer
TOKENS = {character: number for number, character in enumerate(CHARACTERS)}
END, PAD = TOKENS["."], len(CHARACTERS)
DIGITS = 3
ANSWER = DIGITS + 1  # with its end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--samples", type=int, default=16, help="samples per prompt: a group")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps on each batch of samples")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of GRPO")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    set_verbosity_error()
    set_seed(args.seed)
    started = time.perf_counter()

    train, held_out = make_task(args.seed)
    model = build_model()
    warm_up(model, train)
    before = accuracy(model, held_out)
    print(f"held-out accuracy after the warm-up  {before:6.1%}")

    grpo(model, train, args)
    after = accuracy(model, held_out)
    print(f"held-out accuracy after GRPO         {after:6.1%}   ({100 * (after - before):+.0f} points)")
    for item in held_out[:3]:
        print(f"  {item}> {text(answers(model, [item], greedy=True)[0])}")
    print(f"{time.perf_counter() - started:.0f} seconds")


def make_task(seed: int) -> tuple[list[str], list[str]]:
    """Every word of three digits, shuffled: 800 to train on, 200 held out."""
    items = ["".join(digits) for digits in product("0123456789", repeat=DIGITS)]
    random.Random(seed).shuffle(items)
    return items[:800], items[800:]


def build_model() -> LlamaForCausalLM:
    """A hundred thousand parameters, random."""
    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def warm_up(model: LlamaForCausalLM, items: list[str], steps: int = 120) -> None:
    """Supervised fine-tuning on the form of an answer: the digits of the prompt in any order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(steps):
        batch = random.sample(items, 64)
        sequences = encode([f"{item}>{''.join(random.sample(item, DIGITS))}." for item in batch])
        log_probs, mask = answer_log_probs(model, sequences)
        loss, _ = sft_loss(log_probs, mask, denominator=mask.sum())
        step(model, optimizer, loss)


def grpo(model: LlamaForCausalLM, items: list[str], args: argparse.Namespace) -> None:
    """Group Relative Policy Optimization (arXiv 2402.03300), without a KL term."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    settings = PolicySettings(eps_low=0.2, eps_high=0.2)
    for number in range(1, args.steps + 1):
        # 1. A group of samples for each prompt, and what each is worth.
        prompts = [item for item in random.sample(items, args.prompts) for _ in range(args.samples)]
        responses = answers(model, prompts)  # [prompts * samples, ANSWER]
        rewards = torch.tensor([reward(*pair) for pair in zip(prompts, responses, strict=True)])
        sequences = torch.cat([encode([f"{item}>" for item in prompts]), responses], dim=1)

        # 2. A sample's advantage is its reward relative to its group; all tokens of an answer share it.
        group_ids = torch.arange(args.prompts).repeat_interleave(args.samples)
        advantages = group_norm(rewards, group_ids).unsqueeze(1).expand_as(responses)

        # 3. The clipped surrogate: at the first update the ratio is 1, at later ones it is kept near 1.
        old_log_probs = None
        for _ in range(args.updates):
            log_probs, mask = answer_log_probs(model, sequences)
            old_log_probs = log_probs.detach() if old_log_probs is None else old_log_probs
            loss, metrics = policy_loss(log_probs, old_log_probs, advantages, mask, mask.sum(), settings)
            step(model, optimizer, loss)
        if number % 10 == 0 or number == 1:
            clipped = float(metrics["clip_ratio"].value)
            print(f"step {number:4}   reward {rewards.mean():.3f}   clipped {clipped:.3f}", flush=True)


def reward(item: str, response: Tensor) -> float:
    """Verified by program: the sorted digits and nothing else."""
    return float(text(response) == "".join(sorted(item)) + ".")


@torch.no_grad()
def answers(model: LlamaForCausalLM, items: list[str], *, greedy: bool = False) -> Tensor:
    """Sampled (or likeliest) answers, [items, ANSWER], padded after their end."""
    prompts = encode([f"{item}>" for item in items])
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    whole = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=ANSWER, pad_token_id=PAD, **sampling
    )
    responses = whole[:, prompts.shape[1] :]
    return torch.nn.functional.pad(responses, (0, ANSWER - responses.shape[1]), value=PAD)


def answer_log_probs(model: LlamaForCausalLM, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of the answers' tokens and where they stand, both [sequences, ANSWER]; the end counts, padding not."""
    targets = sequences[:, -ANSWER:]
    logits = model(sequences).logits[:, -ANSWER - 1 : -1]  # what predicts them stands one place before
    log_probs = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return log_probs, targets != PAD


def step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def accuracy(model: LlamaForCausalLM, items: list[str]) -> float:
    """The share of items that the model sorts when it takes the likeliest token each time."""
    responses = answers(model, items, greedy=True)
    return sum(reward(*pair) for pair in zip(items, responses, strict=True)) / len(items)


def encode(texts: list[str]) -> Tensor:
    """[texts, characters]; all of one length."""
    return torch.tensor([[TOKENS[character] for character in line] for line in texts])


def text(ids: Tensor) -> str:
    return "".join(CHARACTERS[token] for token in ids.tolist() if token != PAD)


if __name__ == "__main__":
    main()
