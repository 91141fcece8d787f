"""Compiled layers and logits: for the whole run (--deepcompile true), or as soon as it is clear that they pay off.

Compiling takes half a minute and makes each step about a fifth shorter, so a short run is faster without it. By
default, `AutomaticCompilation` times the first optimizer steps on a GPU:

    plain -> plain (timed) -> plain (timed) -> the rest of the run is long enough? compile -> compiled -> timed, timed

The first compiled step shows how long compilation took. If the next ones are not faster than the plain ones, or the
compiler fails on this model, the layers run as before. Every change is announced.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from openrlhf.errors import OpenRLHFError, first_line
from openrlhf.models.chunks import PLAIN, LogitPasses
from openrlhf.models.forward import Network
from openrlhf.monitor import say

COMPILER = "inductor"  # backend of torch.compile; tests use one that does not generate C++
WARM_UP = 1  # plain steps that are not timed: the first one loads kernels
TIMED = 2  # steps that are timed, before and after
SAVED = 0.15  # expected share of a step's time; 0.19 was measured for 1.5B parameters on an H200
COST = 30.0  # expected seconds of compilation, of the training and the scoring graph


def compile_network(network: Network) -> None:
    """Compile each decoder layer, which share one graph, and the passes over the logits; they do most of the work."""
    warnings.filterwarnings("ignore", module=r"torch\._inductor")  # its advice is about PyTorch's settings, not flags
    for layer in decoder_layers(network):
        layer.compile(dynamic=True, backend=COMPILER)
    network.logit_passes = LogitPasses.compiled(COMPILER)


def uncompile_network(network: Network) -> None:
    """Undo `compile_network`."""
    for layer in decoder_layers(network):
        layer._compiled_call_impl = None  # undoes `Module.compile`, which has no inverse
    network.logit_passes = PLAIN


def decoder_layers(network: Network) -> list[nn.Module]:
    """Return the layers of a network: those of its decoder, and of other parts such as a vision tower."""

    def outermost(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            yield from child if isinstance(child, nn.ModuleList) else outermost(child)

    return list(outermost(network.decoder.base_model))


def pays_off_on(network: Network, device: torch.device) -> bool:
    """Return whether compiled layers are likely to be faster: in half precision on a GPU, without experts.

    Experts get as many tokens as the router sends them; a compiled graph does not handle that well.
    """
    half = network.dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and not any("expert" in name for name, _ in network.named_parameters())


@dataclass
class AutomaticCompilation:
    """Compiles the layers of a network if enough steps remain to pay for it. Call `begin` and `end` for each step."""

    network: Network
    is_compiled: bool = False
    seen: int = 0  # steps since the start, or since compilation
    plain: list[float] = field(default_factory=list)  # seconds per token of timed steps before compilation
    compiled: list[float] = field(default_factory=list)  # the same after compilation
    finished: bool = False  # nothing is left to decide
    clock: Callable[[], float] = time.perf_counter

    def begin(self, tokens: int) -> None:
        self.tokens, self.started = tokens, self.clock()

    def end(self, steps_left: int) -> None:
        """Note the time of a step that has ended on the device, and decide what to do next."""
        seconds = self.clock() - self.started
        self.seen += 1
        if self.finished:
            return
        if not self.is_compiled:
            if self.seen > WARM_UP:
                self.plain.append(seconds / self.tokens)
            if len(self.plain) == TIMED:
                self._decide(seconds, steps_left)
        elif self.seen == 1:
            say(f"compiled the decoder layers in {max(0.0, seconds - min(self.plain) * self.tokens):.0f} s")
        else:
            self.compiled.append(seconds / self.tokens)
            if len(self.compiled) == TIMED:
                self._judge()

    def _decide(self, seconds: float, steps_left: int) -> None:
        """Compile if the steps that are left save more time than compilation takes."""
        self.finished = steps_left * seconds * SAVED <= COST
        if not self.finished:
            say(
                f"compiling the decoder layers, because {steps_left} steps of {seconds:.3g} s remain; "
                "--deepcompile false prevents it"
            )
            compile_network(self.network)
            self.is_compiled, self.seen = True, 0

    def _judge(self) -> None:
        """Keep the compiled layers if they are faster."""
        before, after = 1 / min(self.plain), 1 / min(self.compiled)
        speeds = f"{after:,.0f} tokens/s, {before:,.0f} without"
        self.finished = True
        if after > before:
            say(f"compiled layers train {speeds}")
        else:
            self._give_up(f"they train {speeds}")

    def _give_up(self, reason: str) -> None:
        uncompile_network(self.network)
        self.is_compiled, self.finished = False, True
        say(f"the decoder layers are no longer compiled: {reason}")

    def survives(self, error: BaseException) -> bool:
        """Return whether to try again without compiled layers.

        Compiler errors have no common base class. In the first compiled steps, therefore, any error that is not ours is
        blamed on the compiler; an error of the model itself recurs without it.
        """
        ours = isinstance(error, OpenRLHFError | torch.OutOfMemoryError)
        if not self.is_compiled or ours or (self.finished and not isinstance(error, TorchDynamoException)):
            return False
        self._give_up(first_line(error)[:200])
        return True
