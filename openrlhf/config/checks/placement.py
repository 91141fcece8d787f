"""Rules about placement in RL: devices per role, engines, colocation and sleep."""

import os

from openrlhf.config.checks.rule import Changed, change
from openrlhf.config.checks.supervised import world_size
from openrlhf.config.commands import LocalRLConfig, RLConfig
from openrlhf.config.flags import flag_values
from openrlhf.config.runtime import (
    launched_nodes,
    num_devices,
    resolve_runtime,
    several_devices,
    used_roles,
    uses_critic,
    uses_reference,
)
from openrlhf.config.sections.cluster import ROLES, Role
from openrlhf.errors import ConfigError, counted


def launched_processes_become_devices(config: RLConfig) -> Changed[RLConfig] | str | None:
    """Turn a launcher's processes into devices on Ray: RL has one driver, so only the first process continues."""
    processes, nodes = world_size(), launched_nodes()
    if processes == 1:
        return None
    counts: dict[str, int] = {}  # per role: one device per launched process, unless its flag is set
    for role in ROLES:
        given = config.placement.given_gpus_per_node(role)
        counts |= {f"{role}_num_nodes": nodes, f"{role}_num_gpus_per_node": given or processes // nodes}
    if nodes > 1 and "RAY_ADDRESS" not in os.environ:
        asked = " ".join(f"--{name} {value}" for name, value in counts.items())
        raise ConfigError(
            f"a launcher started {processes} processes on {nodes} nodes, but reinforcement learning on several nodes "
            "runs on Ray",
            try_this="ray start on every node (docs/cluster.md), then once, without the launcher: "
            f"python -m openrlhf.cli.train_ppo_ray --colocate_all_models {asked} ...",
        )
    if resolve_runtime(config) == "ray" and ("RAY_ADDRESS" in os.environ or several_devices(config)):
        return f"the first of {processes} launcher processes runs the Ray driver; the other processes exit now"
    if not isinstance(config, LocalRLConfig) and config.placement.runtime == "local":
        raise ConfigError(
            f"--runtime local runs in one process, but a launcher started {processes} processes",
            try_this="without --runtime local",
        )
    line = (
        f"{processes} launcher processes: the first one starts Ray on this machine and shares {processes} devices "
        "among all models (--colocate_all_models); the other processes exit now"
    )
    return change(config, line, runtime="ray", colocate_all_models=True, local_rank=-1, **counts)


def local_runtime_is_one_device(config: RLConfig) -> None:
    """Reject --runtime local, which has one process, with device or engine counts above 1."""
    if config.placement.runtime != "local":
        return
    values = flag_values(config)
    counts = [f"{role}_num_{unit}" for role in ROLES for unit in ("nodes", "gpus_per_node")]
    names = (*counts, "vllm_num_engines", "vllm_tensor_parallel_size", "vllm_pipeline_parallel_size")
    several = [f"--{name} {values[name]}" for name in names if int(str(values[name] or 1)) > 1]
    if several:
        raise ConfigError(
            f"--runtime local runs in one process on one device, but {several[0]} needs more",
            try_this="--runtime ray",
        )


def engines_on_one_gpu_are_whole(config: RLConfig) -> None:
    """Reject several engines per GPU for engines that are spread over several GPUs."""
    engines = config.engines
    count, size = engines.vllm_engines_per_gpu or 1, engines.devices_per_engine
    if count > 1 and size > 1 and engines.vllm_num_engines:
        raise ConfigError(
            f"--vllm_engines_per_gpu {count} is for models that fit on a part of a GPU, but "
            f"{engines.size_flags} spreads an engine over {size} GPUs",
            try_this="--vllm_engines_per_gpu 1",
        )


def sleep_needs_colocation(config: RLConfig) -> Changed[RLConfig] | None:
    """Turn off sleep for engines with dedicated devices, which have no reason to free memory."""
    shares = config.placement.colocate_all_models or resolve_runtime(config) == "local"
    if config.engines.vllm_enable_sleep and not shares:
        line = "--vllm_enable_sleep is turned off: without --colocate_all_models the engines have their own devices"
        return change(config, line, vllm_enable_sleep=False)
    return None


def async_engines_have_their_own_devices(config: RLConfig) -> str | None:
    """Reject engine sleep in asynchronous runs: generation and training overlap, so engines need their own devices."""
    if not config.asynchrony.async_train:
        return None
    if config.engines.vllm_enable_sleep:
        raise ConfigError(
            "--vllm_enable_sleep stops the engines during training, but --async_train runs both at the same time",
            try_this="without --vllm_enable_sleep",
        )
    line = "--colocate_all_models with --async_train: the models share devices, but the engines get their own"
    return line if config.placement.colocate_all_models else None


def shared_devices_have_equal_counts(config: RLConfig) -> None:
    """Require equal device counts for models that share devices: each has one process per device."""
    placement = config.placement
    shared: list[tuple[str, Role, Role]] = []
    if uses_reference(config) and (placement.colocate_actor_ref or placement.colocate_all_models):
        name = "all_models" if placement.colocate_all_models else "actor_ref"
        shared.append((f"--colocate_{name}", "actor", "ref"))
    if uses_critic(config) and config.rewards.reward_pretrain and placement.colocate_critic_reward:
        shared.append(("--colocate_critic_reward", "critic", "reward"))
    for flag, one, other in shared:
        here, there = num_devices(config, one), num_devices(config, other)
        if (placement.num_nodes(one), here) != (placement.num_nodes(other), there):
            raise ConfigError(
                f"{flag} puts {one} and {other} on the same devices, but their nodes or devices "
                f"differ ({here} and {there} devices)",
                try_this=f"equal --{one}_num_nodes/--{other}_num_nodes and --{one}_num_gpus_per_node/"
                f"--{other}_num_gpus_per_node",
            )


def hybrid_engines_cover_the_policy(config: RLConfig) -> None:
    """Require engines on exactly the policy's devices: hybrid engines receive weights within a device."""
    engines, nodes = config.engines.vllm_num_engines or 0, config.placement.actor_num_nodes
    if not (config.placement.colocate_all_models and engines) or config.asynchrony.async_train:
        return
    policy, size, flags = num_devices(config, "actor"), config.engines.devices_per_engine, config.engines.size_flags
    if policy != engines * size:
        per_node, rest = divmod(engines * size, nodes)
        raise ConfigError(
            f"--colocate_all_models shares the policy's {counted(policy, 'device')} with the engines, but "
            f"--vllm_num_engines {engines} x {flags} is {engines * size}",
            try_this=f"--vllm_num_engines {policy // size}" if rest else f"--actor_num_gpus_per_node {per_node}",
        )
    per_node = policy // nodes
    if per_node % size and size % per_node:
        raise ConfigError(
            f"the engines' {counted(size, 'device')} ({flags}) do not fit the {per_node} that the policy has on a "
            "node: expected whole engines on a node, or whole nodes for an engine",
            try_this=f"a multiple of {size} for --actor_num_gpus_per_node",
        )


def groups_divide_the_devices(config: RLConfig) -> None:
    """Require that ring and tensor-parallel groups divide the devices of each role."""
    ring, tensor = config.sharding.ring_attn_size, config.sharding.ds_tensor_parallel_size
    for role in used_roles(config):
        if role == "reward" and ring == 1:
            continue  # a reward model is not tensor-parallel; only rings split its rows
        devices = num_devices(config, role)
        if devices % (ring * tensor):
            raise ConfigError(
                f"--ring_attn_size {ring} x --ds_tensor_parallel_size {tensor} does not divide the "
                f"{counted(devices, 'device')} of {role}",
                try_this=f"--{role}_num_gpus_per_node {ring * tensor}",
            )


def engines_have_a_device(config: RLConfig) -> str | None:
    """Warn about generation with Transformers on a cluster, which works but is slow and rarely intended."""
    if resolve_runtime(config) == "ray" and not config.engines.vllm_num_engines:
        return "--vllm_num_engines is not given: Transformers generates in the policy's workers and is slower than vLLM"
    return None
