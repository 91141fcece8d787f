"""Training on several devices with PyTorch alone: fully sharded data parallelism (FSDP2).

`FsdpBackend` implements `TrainBackend` and `FsdpFrozen` implements `Frozen`; every process of the launch constructs one
and makes the same calls in the same order. Weights, gradients and optimizer states are sharded, as under ZeRO-3.
`fsdp_shards` shards a network and gathers its weights, `fsdp_optim` updates the shards, and `fsdp_checkpoint` saves
them so that any number of processes can resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from openrlhf.config.sections.training import OptimizerFlags, ShardingFlags
from openrlhf.models.export import raw_tensors, saved_tensors
from openrlhf.models.forward import Network
from openrlhf.models.plain import checkpoint_weights
from openrlhf.models.self_test import choose_layout
from openrlhf.training import fsdp_shards as shards
from openrlhf.training.audit import Audit
from openrlhf.training.backend import Frozen, WeightPart
from openrlhf.training.compilation import compile_network
from openrlhf.training.distributed import DistributedBackend, largest
from openrlhf.training.fsdp_checkpoint import Block, load_shards, save_shards
from openrlhf.training.fsdp_optim import ShardOptimizer
from openrlhf.training.local import MasterBackend
from openrlhf.training.optim import LossScale
from openrlhf.training.process_grid import share_rows
from openrlhf.training.tensor_parallel import TensorParallel

FOLDER = "fsdp"  # inside a checkpoint


class FsdpFrozen(Frozen):
    """A sharded model that is not trained; `offload` keeps its shards in host memory between uses."""

    def __init__(
        self, network: Network, sharding: ShardingFlags, device: torch.device, *, offload: bool = False
    ) -> None:
        super().__init__(network.eval().requires_grad_(False), device)
        share_rows(network, sharding, device.type)
        size = sharding.expert_parallel_size
        root = shards.shard_network(network, device, expert_parallel_size=size, offload=offload, keep_head=True)
        self.run = shards.run_sharded(root)
        choose_layout(network, self.forward, lambda excess: float(largest(excess, device)))

    def most_rounds(self, count: int) -> int:
        return int(largest(count, self.device))


class FsdpBackend(DistributedBackend, MasterBackend):
    """One network and its optimizer, sharded over all processes; call `start_processes` first."""

    def __init__(
        self,
        network: Network,
        optimizer: OptimizerFlags,
        sharding: ShardingFlags,
        device: torch.device,
        *,
        learning_rate: float,
    ) -> None:
        super().__init__(network, device)
        data_ranks = share_rows(network, sharding, device.type)
        size = sharding.ds_tensor_parallel_size
        self.tensor_parallel = TensorParallel(network, device, size) if size > 1 else None
        if self.tensor_parallel is not None and data_ranks is None:
            data_ranks = self.tensor_parallel.grid["data"].get_group()
        self.join_ranks(data_ranks)
        self.module = self.root = shards.shard_network(
            network,
            device,
            tensor_parallel=self.tensor_parallel,
            expert_parallel_size=sharding.expert_parallel_size,
            offload=sharding.adam_offload,
        )
        self.expert_groups = shards.expert_groups(self.root)
        self.run = shards.run_sharded(self.root)
        self.is_offloaded = sharding.adam_offload
        choose_layout(network, self.forward, lambda excess: float(largest(excess, device)))
        self.optimizer = self.shard_optimizer = ShardOptimizer(
            network, optimizer, learning_rate, device=device, experts=self.expert_groups
        )
        self.loss_scale = LossScale() if network.dtype == torch.float16 else None
        self.audit = Audit(self.optimizer.named, lambda master: master, lambda found: largest(found, device))
        if sharding.deepcompile:
            compile_network(network)
        self.module.train()

    def optim_step(self, scale: float) -> float | None:
        if self.tensor_parallel is not None:
            self.tensor_parallel.sum_partial_gradients()
        self.shard_optimizer.link()
        if self.audit.hooks:  # the hooks do not fire, because autograd does not see the shards
            for number, (_, master) in enumerate(self.optimizer.named):
                if master.grad is not None:
                    self.audit.see(number, master.grad)
        return super().optim_step(scale)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return checkpoint_weights(self.network, shards.gather_groups(self.root))

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        return saved_tensors(self.network, shards.gather_each(self.root, self.network.dtype, self.device))

    def parts(self) -> Iterator[WeightPart]:
        for name, tensor in raw_tensors(self.network):
            block = shards.block_of(tensor, self.expert_groups.get(id(tensor)))
            yield WeightPart(name, shards.local_shard(tensor), block)

    @property
    def num_part_holders(self) -> int:
        return self.num_processes

    def joined(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in raw_tensors(self.network):
            part = parts[name].to(self.device, self.network.dtype)
            if isinstance(tensor, DTensor):
                part = shards.gather_whole(tensor, part, self.expert_groups.get(id(tensor)))
            yield name, part

    def save(self, folder: Path) -> None:
        self.shard_optimizer.link()
        save_shards(
            folder / FOLDER, self.state(), self.blocks(), process=self.process, num_processes=self.num_processes
        )

    def load(self, folder: Path) -> None:
        self.shard_optimizer.link()
        self.restore(folder, lambda: load_shards(folder / FOLDER, self.blocks()))

    def blocks(self) -> dict[str, Block]:
        """Return the part of each trained parameter that this process holds."""
        return {
            name: shards.block_of(parameter, self.expert_groups.get(id(parameter)))
            for name, parameter in self.shard_optimizer.sharded
        }

    def checkpoint_bytes(self) -> int:
        return 12 * sum(math.prod(block.shape) for block in self.blocks().values())

    def sleep(self) -> None:
        if self.device.type != "cpu":
            if not self.is_offloaded:
                self.root.to("cpu")
                self.shard_optimizer.link()  # otherwise the masters would keep the memory of the shards
            self.host.take(self.optimizer_states())
            torch.cuda.empty_cache()

    def wake(self) -> None:
        if self.device.type != "cpu":
            if not self.is_offloaded:
                self.root.to(self.device)
            super().wake()
