"""Mixtures of experts: their sizes in a model's config, and the modules that hold them."""

from torch import nn
from transformers import PretrainedConfig

NUMBERS = ("num_local_experts", "num_experts", "n_routed_experts")  # names of the number of experts in configs


def number_of_experts(config: PretrainedConfig) -> int:
    """Return the number of experts that a router of the model chooses from; 0 without experts."""
    text = config.get_text_config()
    return next((number for name in NUMBERS if (number := getattr(text, name, None))), 0)


def experts_per_token(config: PretrainedConfig) -> int | None:
    """Return how many experts a router chooses for each token; None if the config does not say."""
    return getattr(config.get_text_config(), "num_experts_per_tok", None)


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules in which one tensor holds the matrices of all experts of a layer."""

    def holds_experts(module: nn.Module) -> bool:
        matrices = module._parameters.get("down_proj")
        return matrices is not None and matrices.ndim == 3 and "num_experts" in vars(module)

    return [module for module in model.modules() if holds_experts(module)]
