"""A micro-batch never makes the host wait for the device: no operation in it depends on the contents of a tensor.

A GPU would show such a wait only as lost time. On the CPU, a dispatch mode sees the operations that cause one.
"""

from copy import deepcopy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from openrlhf.config.sections.algorithm import PolicyLossFlags
from openrlhf.config.sections.objectives import DirectPreferenceFlags, DistillationFlags, PairwiseRewardFlags
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import collate
from openrlhf.models.attention import SEGMENTED
from openrlhf.models.forward import Network
from openrlhf.training.backend import StepTotals, counts
from openrlhf.training.local import LocalBackend, LocalFrozen
from openrlhf.training.objectives import SFT, DirectPreference, Distillation, PairwiseReward, Step
from openrlhf.training.rl_objectives import PolicyObjective, ValueObjective
from openrlhf.types import PolicyBatch
from tests.tiny import make_model
from tests.training.test_objectives import pair_rows, token_rows

CPU = torch.device("cpu")
aten = torch.ops.aten
WAITING = {aten.nonzero.default, aten._local_scalar_dense.default, aten.masked_select.default, aten.is_nonzero.default}


class Waits(TorchDispatchMode):
    """Record the operations whose result, or its shape, the host must know."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        indices = args[1] if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) else ()
        by_mask = any(index is not None and index.dtype is torch.bool for index in indices)
        if func in WAITING or by_mask:
            self.found.append(str(func))
        return func(*args, **kwargs or {})


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    made = {
        "policy": AutoModelForCausalLM.from_pretrained(folder, attn_implementation=SEGMENTED),
        "scorer": AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, attn_implementation=SEGMENTED
        ),
    }
    return {name: Network(model) for name, model in made.items()}


def policy_batch():
    batch = collate(token_rows(), packing=True, pad_id=1)
    shape = batch.input_ids.shape
    names = ("advantages", "rollout_log_probs", "old_log_probs", "reference_log_probs", "old_values", "returns")
    return batch.as_kind(PolicyBatch, **{name: torch.linspace(-1, 1, shape[1])[None] for name in names})


CASES = {
    "sft": ("policy", lambda frozen: SFT(), token_rows()),
    "kd": ("policy", lambda frozen: Distillation(DistillationFlags(), frozen), token_rows()),
    "dpo": ("policy", lambda frozen: DirectPreference(DirectPreferenceFlags(), frozen), pair_rows()),
    "rm": ("scorer", lambda frozen: PairwiseReward(PairwiseRewardFlags()), pair_rows()),
    "ppo": ("policy", lambda frozen: PolicyObjective(PolicyLossFlags(), kl_coef=0.1, entropy_coef=0.1), None),
    "gspo": ("policy", lambda frozen: PolicyObjective(PolicyLossFlags(policy_loss_type="gspo")), None),
    "value": ("scorer", lambda frozen: ValueObjective(0.5), None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_micro_batch_does_not_wait_for_the_device(name, networks):
    kind, make, rows = CASES[name]
    backend = LocalBackend(deepcopy(networks[kind]), OptimizerFlags(), CPU, learning_rate=0.0)
    objective = make(LocalFrozen(deepcopy(networks["policy"]), CPU))
    batch = policy_batch() if rows is None else collate(rows, packing=True, pad_id=1)
    if rows is not None:
        (batch,) = objective.prepare([batch], Step(rows, range(len(rows)), len(rows)), backend)
    totals, moved = StepTotals(*counts(batch)), batch.to(CPU)
    with Waits() as waits:
        loss, _ = objective.loss(backend.run, moved, totals)
        backend.backward(loss)
    assert waits.found == []
    assert any(weight.grad is not None and weight.grad.any() for weight in backend.network.parameters())
