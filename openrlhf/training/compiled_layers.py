"""--deepcompile: torch.compile for the decoder layers, whatever backend trains them."""

from torch import nn

from openrlhf.models.forward import Network

COMPILER = "inductor"  # of torch.compile; tests take one that traces alike and writes no C++


def compile_decoder_layers(network: Network) -> None:
    """torch.compile on each decoder layer: nearly all of the work, and the layers share one compiled graph."""
    for module in network.decoder.base_model.children():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                layer.compile(dynamic=True, backend=COMPILER)
