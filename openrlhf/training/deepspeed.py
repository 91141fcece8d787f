"""Training on several devices with DeepSpeed: ZeRO 0 to 3, offloading, tensor parallelism, ring attention.

`DeepSpeedBackend` implements `TrainBackend` and `DeepSpeedFrozen` implements `Frozen`; every process of the launch
constructs one and makes the same calls in the same order. Gradients and metrics are summed over processes; a ring
counts as one data-parallel rank. `deepspeed_config` builds DeepSpeed's settings, `deepspeed_shards` wraps the network
in an engine and gathers its shards, and `processes` starts torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from deepspeed.checkpoint.constants import (
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.runtime.utils import clip_grad_norm_
from torch import Tensor
from torch import distributed as dist

from openrlhf.config.sections.training import OptimizerFlags, ShardingFlags
from openrlhf.errors import BackendError, ConfigError
from openrlhf.models.export import raw_tensors, saved_tensors
from openrlhf.models.forward import Network
from openrlhf.models.plain import checkpoint_weights
from openrlhf.models.self_test import choose_layout
from openrlhf.training import deepspeed_shards as shards
from openrlhf.training.audit import Audit
from openrlhf.training.backend import Frozen, WeightPart
from openrlhf.training.compilation import compile_network
from openrlhf.training.deepspeed_config import NetworkFacts, clips_outside, engine_config, frozen_config
from openrlhf.training.distributed import DistributedBackend, largest
from openrlhf.training.manifest import checkpoints_above, must_be_private
from openrlhf.training.optim import parameter_groups, trainable
from openrlhf.training.process_grid import share_rows

TAG = "deepspeed"  # folder of DeepSpeed's files inside a checkpoint
UNIVERSAL_TAG = "universal"  # the same files, converted for any number of devices
CONVERTER = "python -m deepspeed.checkpoint.ds_to_universal"


class DeepSpeedFrozen(Frozen):
    """A model that is not trained, such as a reference or a teacher.

    Under ZeRO-3 it is sharded; otherwise each rank has a full copy. `offload` keeps its weights in host memory.
    """

    def __init__(
        self, network: Network, sharding: ShardingFlags, device: torch.device, *, offload: bool = False
    ) -> None:
        super().__init__(network.eval().requires_grad_(False), device)
        self.sharded = sharding.zero_stage == 3
        share_rows(network, sharding, device.type)
        if self.sharded:
            config = frozen_config(sharding, _facts(network, device), offload=offload)
            _, self.run = shards.engine_around(network, sharding, config)
            shards.keep_gathered(shards.unhook_head(network))
        else:
            network.to(device)
        choose_layout(network, self.forward, lambda excess: float(largest(excess, device)))
        if offload and not self.sharded:
            self.offload()

    def most_rounds(self, count: int) -> int:
        return int(largest(count, self.device)) if self.sharded else count


class DeepSpeedBackend(DistributedBackend):
    """One network and its optimizer, spread over all processes of the launch.

    Call `start_distributed` first. The optimizer is PyTorch's AdamW, which DeepSpeed shards and offloads, so the
    arithmetic is that of the local backend and no extension has to be compiled.
    """

    def __init__(
        self,
        network: Network,
        optimizer: OptimizerFlags,
        sharding: ShardingFlags,
        device: torch.device,
        *,
        learning_rate: float,
        universal_checkpoint: bool = False,
    ) -> None:
        super().__init__(network, device)
        self.flags = optimizer
        self.learning_rate = learning_rate  # peak; `optim_step` scales it
        self.sharding = sharding
        self.universal = universal_checkpoint
        self.has_adapters = network.model is not network.decoder  # if so, only these are trained, saved and exported
        named = trainable(network)
        if not named:
            raise ConfigError("nothing to train: every parameter is frozen")
        data_ranks = share_rows(network, sharding, device.type)
        facts = _facts(network, device)
        config = engine_config(sharding, optimizer.max_norm, facts, universal=universal_checkpoint)
        # DeepSpeed may run a trial optimizer step on zero gradients. A learning rate of 0 and clearing the state below
        # make it harmless.
        groups = parameter_groups(named, optimizer.l2)
        self.optimizer = torch.optim.AdamW(
            groups, lr=0.0, betas=optimizer.adam_betas, eps=optimizer.adam_eps, fused=True
        )
        self.decays = [group["weight_decay"] for group in self.optimizer.param_groups]
        self.engine, self.run = shards.engine_around(network, sharding, config, self.optimizer)
        self.module = self.engine
        if sharding.zero_stage == 0:
            self.optimizer.state.clear()
        # ZeRO-3 frees the head when it updates, saves or loads weights; `keep_gathered` gathers it again.
        self.head_parameters = shards.unhook_head(network) if sharding.zero_stage == 3 else []
        shards.keep_gathered(self.head_parameters)
        self.averages = dist.get_world_size(self.engine.data_parallel_group)  # processes that DeepSpeed averages over
        self.join_ranks(data_ranks or self.engine.data_parallel_group)
        self.clips_here = clips_outside(sharding, facts)
        self._scales_loss = facts.dtype == torch.float16  # DeepSpeed then skips steps that overflow
        self.engine.enable_backward_allreduce = not self.clips_here
        choose_layout(network, self.forward, lambda excess: float(largest(excess, device)))
        if sharding.deepcompile:  # not with DeepSpeed's own compiler, which expects fixed shapes
            compile_network(network)
        self.engine.train()
        self.audit = Audit(trainable(network), shards.master_shard, lambda found: largest(found, device))

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages gradients over processes, but ours must be summed, including those within a ring. Scaling
        # the loss by the number of processes turns the average into a sum.
        self.engine.backward(loss * self.averages, scale_wrt_gas=False)

    def optim_step(self, scale: float) -> float | None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * scale
        self.audit.begin(self.learning_rate * scale, has_signal=self.has_signal)
        if self.clips_here:  # the engine neither averages nor clips
            self.engine.buffered_allreduce_fallback()
            parameters = [parameter for _, parameter in trainable(self.network)]
            norm = float(clip_grad_norm_(parameters, self.flags.max_norm or math.inf, mpu=self.engine.mpu))
            if not math.isfinite(norm):
                raise BackendError(
                    f"the gradient norm is {norm}, so the weights were not updated", try_this="a smaller learning rate"
                )
            self.engine.step()
        else:
            self.engine.step()
            norm = float(self.engine.get_global_grad_norm())
            if not (math.isfinite(norm) or self._scales_loss):
                raise BackendError(f"the gradient norm is not finite: got {norm}", try_this="a smaller learning rate")
        shards.keep_gathered(self.head_parameters)
        applied = self.engine.was_step_applied()
        self.audit.end(moved=applied)
        return norm if applied else None

    def loss_scaling(self) -> dict[str, float]:
        if not self._scales_loss:
            return {}
        return {"loss_scale": float(self.engine.loss_scale()), "skipped_steps": float(self.engine.skipped_steps)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return checkpoint_weights(self.network, shards.gather)

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        return saved_tensors(self.network, shards.gather)

    @property
    def holds_parts(self) -> bool:
        """Whether each process has shards of all tensors; not with AutoTP, which divides tensors before ZeRO does."""
        return self.sharding.zero_stage == 3 and self.sharding.ds_tensor_parallel_size == 1

    def parts(self) -> Iterator[WeightPart]:
        if not self.holds_parts:
            yield from super().parts()
            return
        for name, tensor in raw_tensors(self.network):
            yield WeightPart(name, *shards.flat_part(tensor))

    @property
    def num_part_holders(self) -> int:
        return self.num_processes if self.holds_parts else 1

    def joined(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if not self.holds_parts:
            yield from super().joined(parts)
            return
        for name, tensor in raw_tensors(self.network):
            yield name, shards.join_flat_parts(tensor, parts[name].to(self.device, self.network.dtype))

    def save(self, folder: Path) -> None:
        mark = {UNIVERSAL_CHECKPOINT_INFO: {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}}
        if self.sharding.ds_tensor_parallel_size > 1:
            mark.clear()  # AutoTP writes its own checkpoint info
        self.engine.save_checkpoint(
            str(folder), tag=TAG, client_state=mark, save_latest=False, exclude_frozen_parameters=self.has_adapters
        )
        shards.keep_gathered(self.head_parameters)

    def load(self, folder: Path) -> None:
        tag = UNIVERSAL_TAG if self.universal else TAG
        if not (folder / tag).is_dir():
            convert = f"{CONVERTER} --input_folder {folder / TAG} --output_folder {folder / UNIVERSAL_TAG}"
            raise BackendError(
                f"{folder} has no {tag} folder, so DeepSpeed cannot resume from it",
                try_this=f"create one with `{convert}`" if self.universal else None,
            )
        must_be_private(checkpoints_above(folder), folder)  # the next line unpickles the files
        self.engine.load_checkpoint(str(folder), tag=tag, load_module_strict=not self.has_adapters)
        # Under ZeRO-3, loading a universal checkpoint gives all groups the same weight decay and all parameters
        # one shared step count. Restore the decays and copy the count.
        for group, decay in zip(self.optimizer.param_groups, self.decays, strict=True):
            group["weight_decay"] = decay
        for parameter, slots in self.optimizer.state.items():
            slots["step"] = slots["step"].to(parameter.device, copy=True)
        shards.keep_gathered(self.head_parameters)

    def sleep(self) -> None:
        if self.device.type != "cpu":
            shards.put_to_sleep(self.engine, self.network, self.optimizer, self.sharding.zero_stage, self.host)

    def wake(self) -> None:
        if self.device.type != "cpu":
            shards.wake_up(self.engine, self.sharding.zero_stage, self.host)
            shards.keep_gathered(self.head_parameters)


def _facts(network: Network, device: torch.device) -> NetworkFacts:
    """Collect the facts about a network that DeepSpeed's settings depend on."""
    parameters: list[shards.ZeroParameter] = list(network.parameters())
    return NetworkFacts(
        dtype=network.decoder.dtype,
        device_type=device.type,
        hidden_size=network.decoder.config.get_text_config().hidden_size,
        num_parameters=sum(p.ds_numel if shards.is_sharded(p) else p.numel() for p in parameters),
    )
