"""DPO and KTO give the losses of TRL 1.16's trainers.

Both get the same model, the same rows in the same order and the same AdamW; losses and gradient norms of every step
must be equal. If TRL differs, the tests compensate:
- its sigmoid loss has no label smoothing; the smoothed form is its `aot` loss over micro-batches of one pair;
- its IPO averages log-probs over tokens, as ours does with --ipo_length_average;
- its KTO pairs a prompt with the previous row's response, ours with the next row's: TRL gets each step's rows in
  reverse order;
- its KTO computes z0 over a micro-batch, ours over the step: here TRL's micro-batch is the whole step.
"""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from openrlhf.training.order import Order
from tests.toy_data import ANSWERS, PAIRS, TEMPLATE, pairs, verdicts, write_rows

pytestmark = pytest.mark.slow(seconds=1)

BATCH, STEPS = 8, 4
ORDER = Order(num_rows=BATCH * STEPS, batch_size=BATCH, epochs=1, seed=42)
SAME = {
    "learning_rate": 5e-3,
    "lr_scheduler_type": "constant",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "num_train_epochs": 1,
    "logging_steps": 1,
    "logging_first_step": True,
    "train_sampling_strategy": "sequential",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "max_length": 128,
}


def train_with_trl(trainer, config, model, rows, **settings):
    """Train with TRL; return the losses and gradient norms that it logs at each step."""
    instance = trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config(output_dir="trl", **SAME | settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    instance.train()
    logged = [line for line in instance.state.log_history if "loss" in line]
    return [line["loss"] for line in logged], [line["grad_norm"] for line in logged]


def assert_equal_training(ran, name, losses, norms):
    assert len(losses) == STEPS
    assert ran.train(name) == pytest.approx(losses, abs=1e-4)
    assert ran.train("grad_norm") == pytest.approx(norms, rel=1e-3)
    assert abs(losses[0] - losses[-1]) > 0.01  # the model changed, so later steps add evidence


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ({"beta": 0.1}, {"beta": 0.1, "per_device_train_batch_size": BATCH}),
        (
            {"ipo": True, "ipo_length_average": True, "beta": 0.5},
            {"loss_type": ["ipo"], "beta": 0.5, "per_device_train_batch_size": BATCH},
        ),
        (
            {"label_smoothing": 0.2, "beta": 0.3},
            {
                "loss_type": ["aot"],
                "label_smoothing": 0.2,
                "beta": 0.3,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": BATCH,
            },
        ),
    ],
    ids=["sigmoid", "ipo", "label smoothing"],
)
def test_dpo_losses_equal_trl(flags, settings, packing, tmp_path, train, models):
    rows = pairs(BATCH * STEPS)
    dataset = write_rows(tmp_path / "rows.jsonl", rows)
    shared = {"train_batch_size": BATCH, "micro_train_batch_size": 3, "learning_rate": 5e-3, "packing_samples": packing}
    ran = train("train_dpo", dataset=dataset, **PAIRS, **shared, **flags)

    ordered = [rows[place] for step in range(STEPS) for place in ORDER.rows(step)]
    texts = [row | {"prompt": TEMPLATE.format(row["prompt"])} for row in ordered]
    assert_equal_training(ran, "loss", *train_with_trl(DPOTrainer, DPOConfig, models(), texts, **settings))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.7)], ids=["even", "weighted"])
def test_kto_losses_equal_trl(weights, tmp_path, train, models):
    rows = verdicts(BATCH * STEPS)
    dataset = write_rows(tmp_path / "rows.jsonl", rows)
    ran = train(
        "train_kto",
        dataset=dataset,
        **ANSWERS,
        train_batch_size=BATCH,
        micro_train_batch_size=3,
        learning_rate=5e-3,
        beta=0.3,
        desirable_loss_weight=weights[0],
        undesirable_loss_weight=weights[1],
    )
    ordered = [rows[place] for step in range(STEPS) for place in reversed(ORDER.rows(step))]
    texts = [
        {"prompt": TEMPLATE.format(row["input"]), "completion": row["output"], "label": bool(row["label"])}
        for row in ordered
    ]
    settings = {"beta": 0.3, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
    logged = train_with_trl(KTOTrainer, KTOConfig, models(), texts, **settings, per_device_train_batch_size=BATCH)
    assert_equal_training(ran, "kto_loss", *logged)
    assert max(ran.train("kl")) > 0
