"""Worker groups: the sets of models that share processes, and the devices of each, as functions of the flags.

`cluster/placement.py` places the groups on nodes, and `workload.py` adds up their contents.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from openrlhf.config.commands import RLConfig
from openrlhf.config.runtime import num_devices, resolve_runtime, used_roles
from openrlhf.config.sections.cluster import Role

NAMES: Mapping[Role, str] = {"actor": "policy", "ref": "reference", "critic": "critic", "reward": "reward"}
COLOCATED = "models"  # name of the single group of --colocate_all_models, and of a local run


@dataclass(frozen=True)
class GroupPlan:
    """A worker group: the processes of one torch.distributed world, one per device, each holding all `roles`."""

    name: str  # such as policy+reference; used in messages
    roles: tuple[Role, ...]
    nodes: int
    devices_per_node: int
    rewards: tuple[int, ...] = ()  # its reward models, by their index in --reward_pretrain

    @property
    def size(self) -> int:
        return self.nodes * self.devices_per_node


def plan_groups(config: RLConfig) -> tuple[GroupPlan, ...]:
    """Return one group per set of roles that share processes, the policy's first; a local run has a single process.

    The config checks guarantee that colocated roles request the same number of devices.
    """
    placement = config.placement
    rewards = tuple(range(len(config.rewards.reward_models))) if config.rewards.scored_by_models else ()
    used = used_roles(config)

    def make_group(name: str, roles: tuple[Role, ...], rewards: tuple[int, ...]) -> GroupPlan:
        nodes = placement.num_nodes(roles[0])
        per_node = num_devices(config, roles[0]) // nodes
        return GroupPlan(name, roles, nodes, per_node, rewards if "reward" in roles else ())

    if placement.colocate_all_models or resolve_runtime(config) == "local":
        return (make_group(COLOCATED, tuple(used), rewards),)
    together: list[tuple[Role, ...]] = []
    if placement.colocate_actor_ref and "ref" in used:
        together.append(("actor", "ref"))
    if placement.colocate_critic_reward and "critic" in used and rewards:
        together.append(("critic", "reward"))
    alone: list[tuple[Role, ...]] = [(role,) for role in used if not any(role in roles for roles in together)]
    groups: list[GroupPlan] = []
    for roles in sorted((*together, *alone), key=lambda roles: used.index(roles[0])):
        if roles == ("reward",) and len(rewards) > 1:
            groups += [make_group(f"reward-{number}", roles, (number,)) for number in rewards]
        else:
            groups.append(make_group("+".join(NAMES[role] for role in roles), roles, rewards))
    return tuple(groups)
