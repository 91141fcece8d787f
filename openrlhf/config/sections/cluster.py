"""Flags about processes: the runtime, the placement of models on devices, and the rollout engines."""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import flag

Role = Literal["actor", "ref", "critic", "reward"]
ROLES: tuple[Role, ...] = ("actor", "ref", "critic", "reward")


@dataclass(frozen=True, kw_only=True)
class PlacementFlags:
    """Placement"""

    runtime: Literal["auto", "local", "ray"] = flag(
        "auto", "local is one process; auto takes Ray where a cluster, several nodes, devices or engines are asked for"
    )
    actor_num_nodes: int = flag(1, "nodes for the policy")
    actor_num_gpus_per_node: int | None = flag(None, "devices per node for the policy; none is 8 on Ray, 1 locally")
    ref_num_nodes: int = flag(1, "nodes for the reference")
    ref_num_gpus_per_node: int | None = flag(None, "devices per node for the reference; none as above")
    critic_num_nodes: int = flag(1, "nodes for the critic")
    critic_num_gpus_per_node: int | None = flag(None, "devices per node for the critic; none as above")
    reward_num_nodes: int = flag(1, "nodes for the reward model")
    reward_num_gpus_per_node: int | None = flag(None, "devices per node for the reward model; none as above")
    colocate_actor_ref: bool = flag(False, "policy and reference share devices")
    colocate_critic_reward: bool = flag(False, "critic and reward model share devices")
    colocate_all_models: bool = flag(False, "all models and the engines share devices (hybrid engine)")
    deepspeed_enable_sleep: bool = flag(False, "move training states off the device between phases")

    def num_nodes(self, role: Role) -> int:
        counts = {
            "actor": self.actor_num_nodes,
            "ref": self.ref_num_nodes,
            "critic": self.critic_num_nodes,
            "reward": self.reward_num_nodes,
        }
        return counts[role]

    def given_gpus_per_node(self, role: Role) -> int | None:
        counts = {
            "actor": self.actor_num_gpus_per_node,
            "ref": self.ref_num_gpus_per_node,
            "critic": self.critic_num_gpus_per_node,
            "reward": self.reward_num_gpus_per_node,
        }
        return counts[role]


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """vLLM engines"""

    vllm_num_engines: int | None = flag(None, "vLLM engines; 0 or none generates with Transformers in process")
    vllm_tensor_parallel_size: int = flag(1, "devices per engine")
    vllm_gpu_memory_utilization: float = flag(0.95, "share of a device's memory that an engine takes")
    vllm_enable_sleep: bool = flag(
        False, "engines give their memory back while the models train (needs --colocate_all_models)"
    )
    vllm_sync_backend: Literal["nccl", "gloo"] = flag("nccl", "how weights reach engines on other devices")
    vllm_sync_with_ray: bool = flag(False, "accepted; weights never travel through Ray here")
    enable_prefix_caching: bool = flag(False, "share the cache of common prefixes; reset at each weight sync")
    enforce_eager: bool = flag(False, "no CUDA graphs in the engines")
    max_restarts: int = flag(1, "restarts of a dead engine before the run stops")
    sync_check_every: int = flag(
        0,
        "prove every N-th weight sync by checksums, and in asynchronous runs by a probe of log-probs; "
        "the first sync and the first with changed weights always are",
    )
