import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM

from openrlhf.algo.token_loss import kd_terms
from openrlhf.models.chunks import (
    LogitPasses,
    distillation_terms,
    plain_linear,
    token_log_probs,
    token_log_probs_and_entropy,
)
from openrlhf.models.heads import VocabularyHead

TOKENS, HIDDEN, VOCAB, CHUNK = 37, 6, 41, 8


class Case:
    """Hidden states, targets and a head; `weights` gives each token a different gradient."""

    def __init__(self, tokens: int = TOKENS, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, HIDDEN, dtype=dtype).requires_grad_()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=dtype)
        self.targets = torch.randint(VOCAB, (tokens,))
        self.weights = torch.randn(tokens)

    def backward(self, *results: Tensor) -> list[Tensor]:
        """Return the results, followed by the gradients of hidden states and head."""
        total = sum((number + 1) * (result * self.weights).sum() for number, result in enumerate(results))
        leaves = [self.hidden, *self.head.parameters()]
        return [*results, *torch.autograd.grad(total, leaves)]


def full_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


HEADS = {
    "linear": lambda linear: linear,
    "of a model": lambda linear: VocabularyHead(model_with(linear), 1.0),
    "a callable": lambda linear: lambda hidden: linear(hidden),
    "asked": lambda linear: VocabularyHead(model_with(linear), None),
    "scaled": lambda linear: VocabularyHead(model_with(linear), 1 / 3),
}


def model_with(linear: nn.Linear) -> LlamaForCausalLM:
    shape = {"hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **shape))
    model.set_output_embeddings(linear)
    return model


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_chunked_log_probs_equal_full_ones(kind, bias, temperature):
    case = Case(bias=bias)
    head = HEADS[kind](case.head)
    got = token_log_probs(case.hidden, case.targets, head, temperature=temperature, chunk=CHUNK)
    expected = full_log_probs(head(case.hidden) / temperature, case.targets)
    assert_close(case.backward(got), case.backward(expected))


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.5, 1.5, TOKENS)], ids=["1", "0.7", "per token"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["linear", "a callable"])
def test_log_probs_are_the_same_with_compiled_passes(kind, frozen, temperature):
    compiled = LogitPasses.compiled("aot_eager_decomp_partition")  # Inductor's decompositions, without its C++
    results = []
    for passes in ({}, {"passes": compiled}):
        case = Case()
        case.head.requires_grad_(not frozen)
        head = HEADS[kind](case.head)
        got = token_log_probs(case.hidden, case.targets, head, temperature=temperature, chunk=CHUNK, **passes)
        (got * case.weights).sum().backward()
        results.append([got, case.hidden.grad, *([] if frozen else [case.head.weight.grad])])
    assert_close(*results)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_entropy_equals_the_full_one(temperature):
    case = Case()
    got = token_log_probs_and_entropy(case.hidden, case.targets, case.head, temperature=temperature, chunk=CHUNK)
    logits = case.head(case.hidden) / temperature
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert_close(case.backward(*got), case.backward(full_log_probs(logits, case.targets), entropy))


@pytest.mark.parametrize("kind", HEADS)
def test_each_token_may_have_its_own_temperature(kind):
    case = Case()
    head, temperature = HEADS[kind](case.head), torch.linspace(0.5, 2.0, TOKENS)
    got = token_log_probs(case.hidden, case.targets, head, temperature=temperature, chunk=CHUNK)
    logits = head(case.hidden) / temperature[:, None]
    assert_close(case.backward(got), case.backward(full_log_probs(logits, case.targets)))
    both = token_log_probs_and_entropy(case.hidden, case.targets, head, temperature=temperature, chunk=CHUNK)
    logits = head(case.hidden) / temperature[:, None]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert_close(case.backward(*both), case.backward(full_log_probs(logits, case.targets), entropy))


def test_entropy_ignores_tokens_of_probability_zero():
    case = Case(bias=True)
    case.head.bias.data[7] = -torch.inf
    _, got = token_log_probs_and_entropy(case.hidden, case.targets, case.head, chunk=CHUNK)
    others = [token for token in range(VOCAB) if token != 7]
    expected = torch.distributions.Categorical(logits=case.head(case.hidden)[:, others]).entropy()
    assert_close(case.backward(got), case.backward(expected))


def test_chunked_distillation_equals_the_full_one():
    case, teacher = Case(), nn.Linear(4, VOCAB)
    states = torch.randn(TOKENS, 4)
    got = distillation_terms(case.hidden, states, case.targets, case.head, teacher, chunk=CHUNK)
    expected = kd_terms(case.head(case.hidden), teacher(states), case.targets)
    assert_close(case.backward(*got), case.backward(*expected))
    assert teacher.weight.grad is None


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns, in forward and backward passes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        sizes = [leaf.numel() for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return result


@pytest.mark.parametrize("function", [token_log_probs, token_log_probs_and_entropy, distillation_terms])
@pytest.mark.parametrize("kind", HEADS)
def test_no_tensor_is_larger_than_a_chunk_of_logits(kind, function):
    case = Case(tokens=200)
    head = HEADS[kind](case.head)
    teacher = (torch.randn(200, HIDDEN), case.targets, head, head)
    with LargestTensor() as largest:
        if function is distillation_terms:
            results = function(case.hidden, *teacher, chunk=CHUNK)
        else:
            results = function(case.hidden, case.targets, head, chunk=CHUNK)
        case.backward(*([results] if isinstance(results, Tensor) else results))
    assert largest.numbers <= max(CHUNK * VOCAB, 200 * HIDDEN) < 200 * VOCAB


def test_a_head_is_called_on_a_chunk_at_a_time():
    class Recording(nn.Linear):
        rows: list[int] = []  # noqa: RUF012

        def forward(self, hidden: Tensor) -> Tensor:
            self.rows.append(len(hidden))
            return super().forward(hidden)

    case = Case()
    head = Recording(HIDDEN, VOCAB, bias=False)
    token_log_probs(case.hidden, case.targets, head, chunk=CHUNK).sum().backward()
    assert head.rows == [8, 8, 8, 8, 5, 5, 8, 8, 8, 8]  # and again, from the end, for the backward pass


@pytest.mark.parametrize("kind", HEADS)
def test_no_targets_give_no_gradient(kind):
    case = Case(tokens=0)
    got = token_log_probs(case.hidden, case.targets, HEADS[kind](case.head), chunk=CHUNK)
    assert got.shape == (0,)
    got.sum().backward()
    assert (case.head.weight.grad == 0).all()
    assert case.hidden.grad.shape == (0, HIDDEN)


def test_half_precision_is_summed_in_fp32():
    case, exact = Case(tokens=500, dtype=torch.bfloat16), Case(tokens=500)
    exact.targets, exact.weights = case.targets, case.weights
    with torch.no_grad():
        exact.hidden.copy_(case.hidden)
        exact.head.weight.copy_(case.head.weight)
    with torch.backends.mkldnn.flags(enabled=False):  # its bf16 kernels crash on CPUs that report AMX but trap it
        got = token_log_probs(case.hidden, case.targets, case.head, chunk=100)
        measured = case.backward(got)
    assert got.dtype == torch.float32
    expected = exact.backward(full_log_probs(exact.head(exact.hidden), exact.targets))
    for ours, theirs in zip(measured, expected, strict=True):
        assert (ours.float() - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.5, 2.0, TOKENS)])
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_a_frozen_head_gives_the_gradient_of_a_trained_one(factor, temperature):
    frozen, trained = Case(), Case()
    frozen.head.requires_grad_(False)
    results = []
    for case in (frozen, trained):
        head = VocabularyHead(model_with(case.head), factor)
        got = token_log_probs(case.hidden, case.targets, head, temperature=temperature, chunk=CHUNK)
        (got * case.weights).sum().backward()
        results.append([got, case.hidden.grad])
    assert_close(*results)


def test_a_frozen_head_is_multiplied_twice_for_both_passes():
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.mm.default
            return func(*args, **kwargs or {})

    case = Case(tokens=CHUNK)
    case.head.requires_grad_(False)
    with Products() as products:
        token_log_probs(case.hidden, case.targets, case.head, chunk=CHUNK).sum().backward()
    assert products.count == 2
    with Products() as products, torch.no_grad():
        token_log_probs(case.hidden, case.targets, case.head, chunk=CHUNK)
    assert products.count == 1


def test_a_frozen_head_gets_no_gradient_and_a_trained_one_below_frozen_states_does():
    case = Case()
    case.head.requires_grad_(False)
    token_log_probs(case.hidden, case.targets, case.head, chunk=CHUNK).sum().backward()
    assert case.head.weight.grad is None
    assert case.hidden.grad is not None
    other = Case()
    token_log_probs(other.hidden.detach(), other.targets, other.head, chunk=CHUNK).sum().backward()
    assert other.head.weight.grad is not None


def test_heads_that_are_a_plain_matrix_product():
    linear = nn.Linear(2, 3, bias=False)
    assert plain_linear(linear) == (linear.weight, 1.0)
    assert plain_linear(VocabularyHead(model_with(linear), 0.5)) == (linear.weight, 0.5)
    assert plain_linear(VocabularyHead(model_with(linear), None)) is None
    assert plain_linear(nn.Linear(2, 3)) is None
    assert plain_linear(type("Adapted", (nn.Linear,), {})(2, 3, bias=False)) is None
    assert plain_linear(linear.forward) is None
    linear.weight.ds_id = 0  # ZeRO-3's mark
    assert plain_linear(linear) is None
