"""--deepcompile: torch.compile on the decoder layers, for the local and the DeepSpeed backend alike."""

from torch import nn

from openrlhf.models.forward import Network

COMPILER = "inductor"  # backend of torch.compile; tests use one that traces the same graphs but generates no C++


def compile_decoder_layers(network: Network) -> None:
    """Compile each decoder layer: the layers do nearly all of the work and share one compiled graph."""
    for module in network.decoder.base_model.children():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                layer.compile(dynamic=True, backend=COMPILER)
