"""The RL loop of openrlhf in one file: read this first.

    python examples/rl_loop.py          a laptop CPU and half a minute are enough

A small model learns to sort three digits. The prompt is "483>", and a right answer is "348" and the end of the text.
First it learns the form of an answer: supervised fine-tuning on the digits of the prompt in any order. Then GRPO
teaches it to sort them by a reward alone: 1 for the sorted digits, 0 for anything else. Held-out items are never
trained on.

All objects are those of the real trainer, `openrlhf train_ppo`:

    HFEngine          an `Engine`: requests go in, completions with their log-probs come out    rollout/hf.py
    join_turn         a finished sample: its tokens, which of them were sampled, its reward     agents/trajectory.py
    group_norm        how much better a sample is than the other samples of its prompt          algo/shaping.py
    PolicyBatch       samples as tensors, with an advantage for each token                      types.py
    PolicyObjective   the clipped policy loss of a batch                              training/rl_objectives.py
    LocalBackend      a `TrainBackend`: forward and backward over micro-batches, optimizer step training/local.py

The real loop (rl/controller.py) does the same in the same order. It adds a reference model and a critic, rollouts that
overlap with training, reward functions in their own processes, multi-turn agents, checkpoints and logs, and it runs
on many devices: vLLM, DeepSpeed and Ray implement the same `Engine` and `TrainBackend`.
"""

import argparse
import asyncio
import random
import time
from itertools import product

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from transformers.utils.logging import set_verbosity_error

from openrlhf.agents.scores import Scored
from openrlhf.agents.trajectory import join_turn
from openrlhf.algo.shaping import group_norm
from openrlhf.config.sections.algorithm import PolicyLossFlags
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import Layout, pad
from openrlhf.models.forward import Network
from openrlhf.rl.samples import RolloutTokens
from openrlhf.rollout.hf import HFEngine
from openrlhf.training.local import LocalBackend
from openrlhf.training.objectives import SFT
from openrlhf.training.rl_objectives import PolicyObjective
from openrlhf.types import PolicyBatch, Prompt, Request, SamplingParams, TokenRow, Trajectory

CPU = torch.device("cpu")
CHARACTERS = "0123456789>"
END, PAD = "</s>", "<pad>"
DIGITS = 3
ANSWER = DIGITS + 1  # tokens, with the end
CONTEXT = 16  # tokens of a prompt and its answer, at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="rollouts, each followed by training on it")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per rollout")
    parser.add_argument("--samples", type=int, default=16, help="samples per prompt: a group")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps per rollout")
    parser.add_argument("--micro_batch", type=int, default=128, help="samples per forward pass; changes no result")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate of GRPO")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    set_verbosity_error()
    set_seed(args.seed)
    started = time.perf_counter()

    # Every word of three digits, shuffled: 800 to train on, 200 held out.
    items = ["".join(digits) for digits in product("0123456789", repeat=DIGITS)]
    random.Random(args.seed).shuffle(items)
    train, held_out = items[:800], items[800:]

    tokenizer = make_tokenizer()
    network = make_network(tokenizer)
    engine = HFEngine(network, tokenizer)  # generates with the network that is trained, so weights need no transfer
    warm_up(network, tokenizer, train)
    before = asyncio.run(accuracy(engine, tokenizer, held_out))
    print(f"held-out accuracy after the warm-up  {before:6.1%}")

    asyncio.run(learn(network, engine, tokenizer, train, args))
    after = asyncio.run(accuracy(engine, tokenizer, held_out))
    print(f"held-out accuracy after GRPO         {after:6.1%}   ({100 * (after - before):+.0f} points)")
    print(f"{time.perf_counter() - started:.0f} seconds")


async def learn(
    network: Network,
    engine: HFEngine,
    tokenizer: PreTrainedTokenizerFast,
    items: list[str],
    args: argparse.Namespace,
) -> None:
    """Group Relative Policy Optimization (arXiv 2402.03300), without a KL term."""
    backend = LocalBackend(network, OptimizerFlags(), CPU, learning_rate=args.lr)
    objective = PolicyObjective(PolicyLossFlags(eps_clip=0.2))

    for step in range(1, args.steps + 1):
        # 1. Rollout: the engine samples a group of responses to each prompt.
        chosen = random.sample(items, args.prompts)
        prompts = [Prompt(index, f"{item}>", tuple(tokenizer.encode(f"{item}>"))) for index, item in enumerate(chosen)]
        asked = [prompt for prompt in prompts for _ in range(args.samples)]
        completions = await engine.generate(
            [
                Request(prompt.input_ids, SamplingParams(max_tokens=ANSWER, seed=step * len(asked) + number))
                for number, prompt in enumerate(asked)
            ]
        )

        # 2. Reward: a program checks each answer. A finished sample is a trajectory, in which the mask separates the
        #    policy's tokens from those of the prompt, and the log-probs are those of the weights that sampled it.
        trajectories = []
        for prompt, completion in zip(asked, completions, strict=True):
            value = reward(chosen[prompt.index], completion.text)
            trajectories.append(join_turn(prompt, completion, CONTEXT, Scored(reward=value, score=value)))

        # 3. Advantages: each sample's reward relative to its group, the same for all tokens of the response.
        rewards = torch.tensor([item.reward for item in trajectories])  # [samples]
        groups = torch.tensor([item.prompt.index for item in trajectories])  # [samples]
        advantages = group_norm(rewards, groups)  # [samples]

        # 4. Training: a few optimizer steps on this rollout. In the first, the ratio of new to old probabilities is 1;
        #    in later ones, clipping keeps it close to 1. A step is split into micro-batches to save memory. The backend
        #    counts the tokens of all of them first, so that the gradient is that of the whole step.
        batches = make_batches(trajectories, advantages, tokenizer.pad_token_id, args.micro_batch)
        for _ in range(args.updates):
            losses = backend.forward_backward(batches, objective)
            backend.optim_step(1.0)  # factor on the learning rate; the real loop has a schedule here

        # 5. Weight sync: the engine has the new weights already and only needs to know their version.
        await engine.load([], version=step)

        if step % 10 == 0 or step == 1:
            clipped = float(losses.metrics["ppo_clip_ratio"].value)
            print(f"step {step:4}   reward {rewards.mean():.3f}   clipped {clipped:.3f}", flush=True)


def make_batches(
    trajectories: list[Trajectory], advantages: Tensor, pad_id: int, micro_batch: int
) -> list[PolicyBatch]:
    """Lay out samples as padded tensors, `micro_batch` samples in each."""
    tokens = RolloutTokens(trajectories, Layout(packing=False, pad_id=pad_id))
    log_probs = torch.from_numpy(np.concatenate([item.rollout_log_probs for item in trajectories]))  # [tokens]
    per_token = advantages.repeat_interleave(torch.from_numpy(tokens.lengths))  # [tokens] of all samples
    batches = []
    for start in range(0, len(trajectories), micro_batch):
        part = range(start, min(start + micro_batch, len(trajectories)))
        batches.append(
            tokens.batch(part).as_kind(
                PolicyBatch,
                advantages=tokens.lay_out(per_token, part),
                rollout_log_probs=tokens.lay_out(log_probs, part),
                old_log_probs=tokens.lay_out(log_probs, part),
            )
        )
    return batches


def reward(item: str, response: str) -> float:
    """Verifiable reward: 1 for the sorted digits and nothing else."""
    return float(response.removesuffix(END) == "".join(sorted(item)))


async def accuracy(engine: HFEngine, tokenizer: PreTrainedTokenizerFast, items: list[str]) -> float:
    """The share of items that the model sorts if it always takes the likeliest token."""
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0.0)
    requests = [Request(tuple(tokenizer.encode(f"{item}>")), greedy) for item in items]
    completions = await engine.generate(requests)
    pairs = zip(items, completions, strict=True)
    return sum(reward(item, completion.text) for item, completion in pairs) / len(items)


def warm_up(network: Network, tokenizer: PreTrainedTokenizerFast, items: list[str], steps: int = 120) -> None:
    """Supervised fine-tuning: the same backend with another objective."""
    backend = LocalBackend(network, OptimizerFlags(), CPU, learning_rate=2e-3)
    for _ in range(steps):
        rows = []
        for item in random.sample(items, 64):
            text = f"{item}>{''.join(random.sample(item, DIGITS))}{END}"
            ids = np.array(tokenizer.encode(text), dtype=np.int32)
            rows.append(TokenRow(ids, target_mask=np.arange(len(ids)) > DIGITS))  # learn the answer, not the prompt
        backend.forward_backward([pad(rows, tokenizer.pad_token_id)], SFT())
        backend.optim_step(1.0)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {token: number for number, token in enumerate([END, PAD, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def make_network(tokenizer: PreTrainedTokenizerFast) -> Network:
    """A hundred thousand random weights. `Network` computes log-probs for any decoder of Transformers."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Network(LlamaForCausalLM(config))


if __name__ == "__main__":
    main()
