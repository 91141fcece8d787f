import numpy as np
import pytest
import torch
from networks import gradients
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from openrlhf.config.sections.model import LoadingFlags, LoraFlags, ModelFlags
from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.data.collate import pack
from openrlhf.errors import ConfigError
from openrlhf.models.attention import SEGMENTED
from openrlhf.models.forward import LogProbs, Network
from openrlhf.models.load import (
    add_adapters,
    choose_dtype,
    load_causal_lm,
    load_scalar_model,
    load_tokenizer,
    recompute_activations,
)
from openrlhf.models.self_test import choose_layout
from openrlhf.training.optim import MasterOptimizer
from openrlhf.training.preflight import explain_precision
from openrlhf.types import TokenRow
from tests.models.architectures import build
from tests.tiny import make_model, make_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def load(name, *, packing=False, **flags):
    return load_causal_lm(str(name), ModelFlags(**flags), device=CPU, packing=packing)


def rows(*texts):
    ids = [make_tokenizer()(text).input_ids for text in texts]
    return [TokenRow(np.array(row, dtype=np.int32), np.arange(len(row)) > 0) for row in ids]


def said(capsys):
    """Return our own lines on the console, without Transformers' progress bars."""
    lines = capsys.readouterr().err.splitlines()
    return [line.removeprefix("openrlhf: ") for line in lines if line.startswith("openrlhf: ")]


def test_a_cpu_computes_in_fp32_and_says_so(folder, capsys):
    assert choose_dtype("bf16", CPU) == torch.float32
    assert choose_dtype("bf16", torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("fp16", torch.device("cuda")) == torch.float16
    assert load(folder, param_dtype="bf16").dtype == torch.float32
    explain_precision("bf16", CPU)
    assert said(capsys) == ["no GPU: everything runs in fp32, because bf16 is many times slower on a CPU"]
    explain_precision("fp32", CPU)
    assert said(capsys) == []


def test_the_chosen_attention_is_loaded(folder, capsys):
    assert load(folder).config._attn_implementation == "sdpa"
    assert load(folder, packing=True).config._attn_implementation == SEGMENTED
    assert load(folder, attn_implementation="eager").config._attn_implementation == "eager"
    assert said(capsys) == []
    assert load(folder, attn_implementation="flash_attention_2").config._attn_implementation == "sdpa"
    assert said(capsys) == ["--attn_implementation flash_attention_2: there is no GPU, so SDPA is used instead"]


def test_a_failed_load_is_reported_in_one_line(folder, tmp_path):
    broken = tmp_path / "broken"
    make_model(broken)
    (broken / "model.safetensors").write_bytes(b"not a tensor file")
    headless = tmp_path / "headless"
    make_model(headless)
    (headless / "model.safetensors").unlink()
    for name in (tmp_path / "nowhere", broken, headless):
        with pytest.raises(ConfigError, match=f"cannot load the model {name}: ") as caught:
            load(name)
        assert "\n" not in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"cannot load the tokenizer .*nowhere: .* There is no local folder .*nowhere either"
    ):
        load_tokenizer(str(tmp_path / "nowhere"), LoadingFlags())
    with pytest.raises(ConfigError, match=r"cannot load the model .*: .*made_up"):
        load(folder, attn_implementation="made_up")


def test_a_tokenizer_gets_a_pad_token_and_needs_eos(tmp_path):
    made = make_tokenizer(pad_is_eos=True)
    PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, eos_token="</s>").save_pretrained(tmp_path / "a")
    assert load_tokenizer(str(tmp_path / "a"), LoadingFlags()).pad_token == "</s>"
    PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer).save_pretrained(tmp_path / "b")
    with pytest.raises(ConfigError, match="has no EOS token"):
        load_tokenizer(str(tmp_path / "b"), LoadingFlags())


def test_a_model_without_the_scalar_head_is_rejected_as_reward_model(tmp_path):
    from transformers import AutoModelForSequenceClassification, DistilBertConfig

    config = DistilBertConfig(vocab_size=30, dim=8, n_heads=2, n_layers=1, hidden_dim=8, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no head called score"):
        load_scalar_model(str(tmp_path), ModelFlags(), device=CPU, packing=False, head_prefix="score")


def test_a_family_without_a_classifier_is_rejected_as_reward_model(tmp_path):
    name = make_model(tmp_path, "cohere")
    with pytest.raises(ConfigError, match=r"no sequence classifier for the family cohere\. Try: "):
        load_scalar_model(name, ModelFlags(), device=CPU, packing=False, head_prefix="score", new_head=True)


def test_a_family_with_its_own_table_of_attentions_is_rejected_in_one_line(tmp_path):
    build("git").save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"it has no attention implementation 'openrlhf_segmented'. Try: --attn_implementation eager"
    ):
        load_causal_lm(str(tmp_path), ModelFlags(), device=CPU, packing=True)
    load_causal_lm(str(tmp_path), ModelFlags(attn_implementation="eager"), device=CPU, packing=True)


def test_a_new_scalar_head_is_initialised_by_us(tmp_path):
    name = make_model(tmp_path, hidden_size=512, intermediate_size=8, num_hidden_layers=1)
    torch.manual_seed(0)
    model = load_scalar_model(name, ModelFlags(), device=CPU, packing=False, head_prefix="score", new_head=True)
    assert model.score.weight.shape == (1, 512)
    assert model.score.weight.std().item() == pytest.approx(1 / 513, rel=0.15)


def test_a_reward_model_is_rejected_as_language_model(tmp_path):
    name = make_model(tmp_path / "base")
    model = load_scalar_model(name, ModelFlags(), device=CPU, packing=False, head_prefix="score", new_head=True)
    model.save_pretrained(tmp_path / "reward")
    with pytest.raises(ConfigError, match=r"lack 1 of the model's tensors, such as lm_head\.weight\. Try: a language"):
        load(tmp_path / "reward")


@pytest.mark.parametrize(("kind", "used"), [("mixtral", "grouped_mm"), ("llama", "eager")])
def test_the_implementation_of_experts_is_for_models_that_have_them(tmp_path, kind, used):
    """A run with a mixture of experts may also load dense models, such as its reference."""
    flags = ModelFlags(experts_implementation="grouped_mm")
    model = load_causal_lm(make_model(tmp_path, kind), flags, device=CPU, packing=False)
    assert model.config._experts_implementation == used


def adapted(folder, *, scalar=False, **flags):
    lora = LoraFlags(lora_rank=4, **flags)
    if scalar:
        model = load_scalar_model(folder, ModelFlags(), device=CPU, packing=False, head_prefix="score", new_head=True)
    else:
        model = load(folder)
    return add_adapters(model, lora, scalar=scalar)


def learning(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_rank_zero_adds_no_adapters(folder):
    model = load(folder)
    assert add_adapters(model, LoraFlags(), scalar=False) is model


def test_adapters_on_every_linear_layer_but_the_head(folder):
    names = learning(adapted(folder))
    assert all("lora_" in name for name in names)
    assert {name.split(".lora_")[0].split(".")[-1] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    }


def test_a_scalar_head_trains_fully_next_to_adapters_on_named_modules(folder):
    names = learning(adapted(folder, target_modules=("q_proj", "v_proj"), scalar=True))
    assert {name.split(".lora_")[0].split(".")[-1] for name in names if "lora_" in name} == {"q_proj", "v_proj"}
    assert [name for name in names if "lora_" not in name] == ["base_model.model.score.modules_to_save.default.weight"]


def test_missing_target_modules_are_named(folder):
    with pytest.raises(ConfigError, match=r"--target_modules q_prj: Target modules .*q_prj.* not found") as caught:
        adapted(folder, target_modules=("q_prj",))
    assert "\n" not in str(caught.value)
    assert "Try: all-linear, or some of down_proj, gate_proj, k_proj," in str(caught.value)


def test_dropout_of_experts_is_rejected(tmp_path):
    """PEFT adapts the experts of a layer as one parameter, whose inputs it cannot drop."""
    with pytest.raises(ConfigError, match=r"^--lora_dropout 0.1 cannot be applied to experts .* Try: --lora_dropout 0"):
        adapted(make_model(tmp_path, "mixtral"), lora_dropout=0.1)


def test_layers_that_share_their_weights_get_no_adapters():
    """In zamba, adapters for each use of a shared layer could not be merged into its single weight."""
    with pytest.raises(ConfigError, match=r"layers.2.*q_proj and .*layers.4.*q_proj share their weights"):
        add_adapters(build("zamba"), LoraFlags(lora_rank=2), scalar=False)


def test_adapters_on_unsupported_layers_are_rejected():
    """llama4's router is a linear layer that returns two tensors."""
    network = Network(add_adapters(build("llama4_text"), LoraFlags(lora_rank=2), scalar=False)).eval()
    with pytest.raises(
        ConfigError, match=r"its forward pass with adapters fails with .*\. Try: other --target_modules"
    ):
        choose_layout(network, network)


def test_adapters_train_in_a_model_that_changes_its_embeddings_in_place():
    """ctrl scales the output of its embeddings in place, which autograd forbids for a leaf that requires a gradient."""
    model = add_adapters(build("ctrl"), LoraFlags(lora_rank=2), scalar=False)
    model(input_ids=torch.arange(3, 9)[None]).logits.sum().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_adapters_learn_through_recomputation(folder, reentrant):
    network = Network(adapted(folder)).train()
    batch = pack(rows("hello world", "abc"))
    results = []
    for recompute in (False, True):
        if recompute:
            recompute_activations(network.model, reentrant=reentrant)
        network(batch, LogProbs).log_probs.sum().backward()
        results.append(gradients(network))
    assert results[0].keys() == dict.fromkeys(learning(network)).keys()
    assert_close(results[1], results[0])


def test_a_4_bit_model_learns_only_in_its_adapters(tmp_path):
    name = make_model(tmp_path, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    model = add_adapters(load(name, load_in_4bit=True), LoraFlags(lora_rank=2), scalar=False)
    network = Network(model).train()
    projection = network.decoder.model.layers[0].mlp.up_proj.base_layer
    assert type(projection).__name__ == "Linear4bit"
    assert projection.weight.dtype == torch.uint8
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    optimizer = MasterOptimizer(network, OptimizerFlags(), 0.1)
    for _ in range(2):  # adapters begin with B = 0, so A moves in the second step
        (-network(pack(rows("hello", "abc")), LogProbs).log_probs.sum()).backward()
        optimizer.step(1.0)
    moved = {name for name, parameter in network.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == set(learning(network))
    assert all("lora_" in name for name in moved)
