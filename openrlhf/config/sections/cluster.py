"""Flags for the runtime, the placement of models on devices, and the rollout engines.

Read device counts through `runtime.num_devices`, which applies the default of the chosen runtime.
"""

from dataclasses import dataclass
from typing import Literal

from openrlhf.config.flags import NOT_NEGATIVE, POSITIVE, POSITIVE_SHARE, flag

Role = Literal["actor", "ref", "critic", "reward"]
ROLES: tuple[Role, ...] = ("actor", "ref", "critic", "reward")


@dataclass(frozen=True, kw_only=True)
class PlacementFlags:
    """Placement"""

    runtime: Literal["auto", "local", "ray"] = flag(
        "auto",
        "One process (local) or a cluster (ray); auto chooses Ray if there is a cluster to join, or if several nodes, "
        "devices or engines are requested.",
    )
    actor_num_nodes: int = flag(1, "Nodes for the policy.", POSITIVE)
    actor_num_gpus_per_node: int | None = flag(
        None, "Devices per node for the policy (default: 8 on Ray, else 1).", POSITIVE, essential=True
    )
    ref_num_nodes: int = flag(1, "Nodes for the reference model.", POSITIVE)
    ref_num_gpus_per_node: int | None = flag(
        None, "Devices per node for the reference (default: 8 on Ray, else 1).", POSITIVE
    )
    critic_num_nodes: int = flag(1, "Nodes for the critic.", POSITIVE)
    critic_num_gpus_per_node: int | None = flag(
        None, "Devices per node for the critic (default: 8 on Ray, else 1).", POSITIVE
    )
    reward_num_nodes: int = flag(1, "Nodes for the reward models.", POSITIVE)
    reward_num_gpus_per_node: int | None = flag(
        None, "Devices per node for reward models (default: 8 on Ray, else 1).", POSITIVE
    )
    colocate_actor_ref: bool = flag(False, "Share devices between policy and reference model.")
    colocate_critic_reward: bool = flag(False, "Share devices between critic and reward models.")
    colocate_all_models: bool = flag(
        False, "Share devices between all models and the engines (hybrid engine).", essential=True
    )
    deepspeed_enable_sleep: bool = flag(
        False, "Move weights and optimizer states off the device while another phase runs."
    )
    worker_timeout: float = flag(
        7200.0,
        "Time limit in seconds for loading the models, for one training step and for one checkpoint on Ray; a process "
        "that takes longer counts as hung, and the run ends.",
        POSITIVE,
    )

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

    vllm_num_engines: int | None = flag(
        None,
        "Number of vLLM engines (default: 0; Transformers then generates in the policy's process).",
        NOT_NEGATIVE,
        essential=True,
    )
    vllm_tensor_parallel_size: int = flag(
        1, "Devices that share each layer of an engine, or of one of its pipeline stages.", POSITIVE
    )
    vllm_pipeline_parallel_size: int = flag(
        1,
        "Pipeline stages of an engine: groups of layers, each on --vllm_tensor_parallel_size devices. An engine that "
        "does not fit on a node spans several (needs --runtime ray).",
        POSITIVE,
    )
    vllm_enable_expert_parallel: bool = flag(
        False,
        "Mixtures of experts: the devices of --vllm_tensor_parallel_size hold different experts instead of a part of "
        "each expert.",
    )
    vllm_engines_per_gpu: int = flag(
        0,
        "Engine processes that share the GPU and the memory of each engine. 0 chooses automatically: 2 in a local run "
        "on a GPU with large rollouts and a small model, otherwise 1.",
        NOT_NEGATIVE,
    )
    vllm_gpu_memory_utilization: float = flag(0.95, "Share of a device's memory that its engines use.", POSITIVE_SHARE)
    vllm_enable_sleep: bool = flag(False, "Free the engines' memory while models train (needs --colocate_all_models).")
    vllm_sync_backend: Literal["nccl", "gloo"] = flag(
        "nccl", "Backend that sends weights to engines on other devices; gloo uses host memory and TCP."
    )
    vllm_sync_with_ray: bool = flag(False, "Accepted, but unused: weights are never sent through Ray.")
    enable_prefix_caching: bool | None = flag(
        None,
        "Reuse the KV cache of common prefixes; it is reset at each weight sync (default: on with --agent_func_path, "
        "whose turns share a prefix, and with --router_replay).",
    )
    enforce_eager: bool = flag(False, "Run the engines without CUDA graphs.")
    max_restarts: int = flag(1, "How many times a dead engine is restarted before the run stops.", NOT_NEGATIVE)
    engine_timeout: float = flag(
        1800.0,
        "Seconds without a new token, or for one weight load, after which an engine counts as hung. An engine in a"
        " separate process is restarted; otherwise the run ends.",
        POSITIVE,
    )
    sync_check_every: int = flag(
        0,
        "Verify every N-th weight sync by checksums and, in asynchronous runs, by comparing log-probs; the first sync "
        "and the first one with changed weights are always verified.",
        NOT_NEGATIVE,
    )

    @property
    def devices_per_engine(self) -> int:
        return self.vllm_tensor_parallel_size * self.vllm_pipeline_parallel_size

    @property
    def size_flags(self) -> str:
        """The flags that set `devices_per_engine`, for messages."""
        stages = self.vllm_pipeline_parallel_size
        pipeline = f" x --vllm_pipeline_parallel_size {stages}" if stages > 1 else ""
        return f"--vllm_tensor_parallel_size {self.vllm_tensor_parallel_size}{pipeline}"
