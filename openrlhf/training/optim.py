"""Learning rate schedules, parameter groups, fp32 master weights and the loss scale of fp16.

`MasterOptimizer` is the optimizer of the local backend and, for the shards of a rank, of FSDP (`fsdp_optim`). It
updates fp32 weights for networks of any precision, and `LossScale` keeps fp16 gradients from underflowing. The
DeepSpeed backend uses PyTorch's AdamW directly, because DeepSpeed has its own master weights and loss scale. All
backends share schedules and parameter groups.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.errors import BackendError, ConfigError, first_line
from openrlhf.monitor import say

# Substrings of the names of parameters without weight decay: biases and weights of normalisation layers.
NO_DECAY = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")
WITH_MIN_LR = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
OTHER_SCHEDULER = "--lr_scheduler cosine_with_min_lr"

INITIAL_SCALE = 65536.0  # initial loss scale
LEAST_SCALE = 1.0  # minimum loss scale
GROWTH_INTERVAL = 2000  # consecutive applied steps before the loss scale doubles

Named = tuple[str, nn.Parameter]


def schedule(name: str, *, warmup_ratio: float, total_steps: int, min_lr_ratio: float) -> Callable[[int], float]:
    """Return a function that maps a step, counted from 0, to the factor that multiplies the peak learning rate.

    The factor of the first warm-up step is zero, as in Transformers.
    """
    from transformers import get_scheduler  # imported late: it imports PEFT and bitsandbytes, which is slow

    kwargs = {"min_lr_rate": min_lr_ratio} if name in WITH_MIN_LR else None
    dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    try:
        made = get_scheduler(
            name,
            dummy,
            num_warmup_steps=math.ceil(total_steps * warmup_ratio),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=kwargs,
        )
    except TypeError as error:
        raise ConfigError(
            f"--lr_scheduler {name} needs settings that have no flag: {first_line(error)}", try_this=OTHER_SCHEDULER
        ) from None
    except ValueError as error:
        raise ConfigError(f"--lr_scheduler {name}: {first_line(error)}", try_this=OTHER_SCHEDULER) from None
    if not isinstance(made, torch.optim.lr_scheduler.LambdaLR):
        raise ConfigError(
            f"--lr_scheduler {name} depends on the loss, not on the step, so it cannot be resumed exactly",
            try_this=OTHER_SCHEDULER,
        )
    return made.lr_lambdas[0]


def between_steps(scheduled: Callable[[int], float], place: float) -> float:
    """Interpolate the factor at a fractional step, for runs whose number of steps is not known in advance."""
    step = math.floor(place)
    before, after = scheduled(step), scheduled(step + 1)
    return before + (after - before) * (place - step)


def only_warmup(scheduled: Callable[[int], float], *, steps: int, warmup_ratio: float) -> str | None:
    """Return a warning if a run of `steps` steps ends during warm-up."""
    if not 0 < steps <= math.ceil(steps * warmup_ratio) or scheduled(0) > 0:
        return None
    given = f"(--lr_warmup_ratio {warmup_ratio:g})"
    if steps == 1:
        line = f"the only optimizer step is warm-up {given}, with a learning rate of 0: nothing is learned"
    else:
        line = f"all {steps} optimizer steps are warm-up {given}, the first with a learning rate of 0"
    return f"{line}. Try: --lr_warmup_ratio 0"


def trainable(network: nn.Module) -> list[Named]:
    """List the trainable parameters; a parameter with two names (tied) appears once."""
    return [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]


def parameter_groups(named: Iterable[Named], weight_decay: float) -> list[dict[str, object]]:
    """Split parameters into two groups, with and without weight decay; empty groups are omitted."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in named:
        (plain if any(part in name for part in NO_DECAY) else decayed).append(parameter)
    groups = [(decayed, weight_decay), (plain, 0.0)]
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return True for the parameters that Muon updates: matrices inside the layers, not embeddings or heads."""
    outer = any(part in name for part in ("embed", "lm_head", "score", "wte", "wpe"))
    return parameter.ndim == 2 and not outer


class MasterOptimizer:
    """Adam (and Muon for matrices) on fp32 weights, regardless of the precision of the network.

    A bf16 weight near 1 cannot represent a change below 1/256, and most updates are smaller. Half-precision parameters
    therefore have an fp32 master copy, on the device or (`offload`) in pinned host memory. Gradients are moved to the
    master as soon as they are computed, so that the network's gradients can be freed immediately.
    """

    def __init__(
        self, network: nn.Module, flags: OptimizerFlags, learning_rate: float, *, offload: bool = False
    ) -> None:
        self.flags = flags
        self.learning_rate = learning_rate  # peak learning rate; `step` scales it
        self.named = self.parameters_of(network)
        if not self.named:
            raise ConfigError("nothing to train: every parameter is frozen")
        self.masters: dict[str, nn.Parameter] = {}  # an fp32 parameter that is not offloaded is its own master
        for name, parameter in self.named:
            self.masters[name] = parameter
            if offload and parameter.device.type != "cpu":
                self.masters[name] = nn.Parameter(parameter.detach().to("cpu", torch.float32).pin_memory())
            elif parameter.dtype != torch.float32:
                self.masters[name] = nn.Parameter(parameter.detach().to(torch.float32))
        pairs = [(parameter, self.masters[name]) for name, parameter in self.named]
        self.split = [(parameter, master) for parameter, master in pairs if parameter is not master]
        for parameter, master in self.split:
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))
        # AdamW for all masters, or Muon for the matrices inside the layers and AdamW for the rest.
        self.optimizers: list[torch.optim.Optimizer] = []
        matrices = {n: p for n, p in self.masters.items() if flags.optim == "muon" and is_matrix(n, p)}
        groups = parameter_groups([(n, p) for n, p in self.masters.items() if n not in matrices], flags.l2)
        if groups:
            self.optimizers.append(
                torch.optim.AdamW(groups, lr=learning_rate, betas=flags.adam_betas, eps=flags.adam_eps, fused=True)
            )
        if matrices:
            muon = torch.optim.Muon(
                list(matrices.values()),
                lr=flags.muon_lr,
                weight_decay=flags.l2,
                momentum=flags.muon_momentum,
                nesterov=flags.muon_nesterov,
                ns_steps=flags.muon_ns_steps,
            )
            self.optimizers.append(muon)
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]

    def parameters_of(self, network: nn.Module) -> list[Named]:
        """Return the parameters to update."""
        return trainable(network)

    def clip(self, masters: Sequence[nn.Parameter]) -> float:
        """Scale the gradients down to --max_norm if their norm is larger; return the norm."""
        return float(torch.nn.utils.clip_grad_norm_(masters, self.flags.max_norm or math.inf, foreach=True))

    def step(self, scale: float, loss_scale: float | None = None) -> float | None:
        """Update with `scale` times each peak learning rate; return the gradient norm before clipping.

        If a `loss_scale` is given, gradients are divided by it first, and a step whose gradients are not finite is
        skipped and returns None. Without a loss scale, such gradients raise an error.
        """
        # Wait for asynchronous copies of gradients to host memory and of masters to the device.
        for device in {parameter.device for parameter, master in self.split if master.device != parameter.device}:
            torch.cuda.synchronize(device)
        masters = list(self.masters.values())
        if loss_scale is not None:
            gradients = [master.grad for master in masters if master.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / loss_scale)
        norm = self.clip(masters)
        if loss_scale is not None and not math.isfinite(norm):
            self.drop_gradients()
            return None
        if not math.isfinite(norm):
            raise BackendError(
                f"the gradient norm is {norm}, so the weights were not updated", try_this="a smaller learning rate"
            )
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * scale
            # Muon multiplies in bf16, and oneDNN's bf16 kernels crash on CPUs that report AMX but do not allow it, as
            # in some VMs.
            on_host = optimizer.param_groups[0]["params"][0].device.type == "cpu"
            risky = on_host and isinstance(optimizer, torch.optim.Muon)
            with torch.backends.mkldnn.flags(enabled=False) if risky else nullcontext():
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.publish()
        return norm

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that is not taken."""
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters to the network; they are cast on the device, where casting is faster."""
        for parameter, master in self.split:
            parameter.copy_(master.to(parameter.device, non_blocking=True))

    def state(self) -> dict[str, Tensor]:
        """Return masters and optimizer states as a flat dict of tensors, which safetensors can store."""
        names = {id(master): name for name, master in self.masters.items()}
        tensors = {f"weight/{name}": master.detach() for name, master in self.masters.items()}
        for optimizer in self.optimizers:
            for master, slots in optimizer.state.items():
                tensors |= {f"{slot}/{names[id(master)]}": value for slot, value in slots.items()}
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore tensors from `state`; raise before changing anything if they do not match this network."""
        slots: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            slot, _, name = key.partition("/")
            slots.setdefault(name, {})[slot] = value
        for name, master in self.masters.items():
            saved = slots.get(name, {}).get("weight")
            if saved is None or saved.shape != master.shape:
                there = "nothing" if saved is None else f"{list(saved.shape)}"
                raise BackendError(f"{name}: expected a tensor of shape {list(master.shape)}, got {there}")
        names = {id(master): name for name, master in self.masters.items()}
        for name, master in self.masters.items():
            master.copy_(slots[name].pop("weight"))
        for optimizer in self.optimizers:
            # Only fused optimizers keep the step count on the device of the parameter.
            on_device = any(group.get("fused") for group in optimizer.param_groups)
            for master in (member for group in optimizer.param_groups for member in group["params"]):
                found = slots[names[id(master)]]
                optimizer.state[master] = {
                    slot: value.to(master.device) if slot != "step" or on_device else value
                    for slot, value in found.items()
                }
        self.publish()


def _move_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    """Add a parameter's gradient to that of its master in fp32 and free it; called as a hook after accumulation."""
    gradient = parameter.grad
    assert gradient is not None
    if parameter.device != master.device:
        here = torch.empty_like(master, requires_grad=False, pin_memory=True)
        gradient = here.copy_(gradient, non_blocking=True)  # asynchronous; synchronised below and in `step`
        if master.grad is not None:
            torch.cuda.current_stream(parameter.device).synchronize()
    if master.grad is None:
        master.grad = gradient.to(torch.float32)
    else:
        master.grad.add_(gradient)  # even from bf16, without an fp32 copy
    parameter.grad = None


@dataclass
class LossScale:
    """Dynamic loss scale of an fp16 model (DeepSpeed has its own).

    The smallest positive fp16 number is 6e-8, and gradients of a mean over many tokens can be smaller. The scale is
    halved when gradients overflow and doubled after many steps without overflow, as in torch's GradScaler. It is
    always a power of two, so that scaling and unscaling are exact.
    """

    value: float = INITIAL_SCALE
    applied: int = 0  # steps since the scale last changed
    skipped: int = 0  # steps skipped in the whole run

    def update(self, *, overflowed: bool) -> None:
        """Adjust the scale after a step; `overflowed` means it was skipped because a gradient was not finite."""
        if not overflowed:
            self.applied += 1
            if self.applied == GROWTH_INTERVAL:
                self.value, self.applied = self.value * 2, 0
            return
        if self.value <= LEAST_SCALE:
            raise BackendError(
                f"fp16 gradients are not finite even with loss scale {self.value:g}; the weights were not updated",
                try_this="--param_dtype bf16, or a smaller learning rate",
            )
        lower = self.value / 2
        say(f"skipped an optimizer step: gradients overflowed with loss scale {self.value:g}, now {lower:g}")
        self.value, self.applied, self.skipped = lower, 0, self.skipped + 1
