"""Evaluate saved models with Transformers alone, as an independent check of our own numbers."""

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.toy_data import TEMPLATE


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def log_probs(model, tokenizer, prompt, response):
    """Return log p of each token of the response and of the EOS after it."""
    before = tokenizer(prompt, add_special_tokens=False).input_ids
    after = [*tokenizer(response, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    ids = torch.tensor([before + after])
    scores = model(ids).logits[0, :-1].log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None]).squeeze(-1)[len(before) - 1 :]


def mean_loss(folder, rows):
    """Return the mean negative log-likelihood over all response tokens."""
    model, tokenizer = load(folder)
    parts = [log_probs(model, tokenizer, TEMPLATE.format(row["input"]), row["output"]) for row in rows]
    return -torch.cat(parts).mean().item()


def log_ratios(folder, reference, prompts, responses):
    """Return log p - log p_ref summed over each response."""
    (policy, tokenizer), (frozen, _) = load(folder), load(reference)
    return torch.stack(
        [
            (log_probs(policy, tokenizer, *texts) - log_probs(frozen, tokenizer, *texts)).sum()
            for texts in zip(prompts, responses, strict=True)
        ]
    )


@torch.no_grad()
def scores(folder, texts):
    """Return the reward of each text, computed in one padded batch."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer([text + tokenizer.eos_token for text in texts], padding=True, return_tensors="pt")
    return model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.squeeze(-1)


@torch.no_grad()
def step_verdicts(folder, text):
    """For each # in the text, return whether + (0) or - (1) is more likely."""
    model, tokenizer = load(folder)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    marks = tokenizer.convert_tokens_to_ids(["+", "-"])
    best = model(ids).logits[0][:, marks].argmax(-1)
    return best[ids[0] == tokenizer.convert_tokens_to_ids("#")]
