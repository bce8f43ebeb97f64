# SPDX-License-Identifier: Apache-2.0
"""The components of the core distribution, named by strings, so that listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_environments() -> list[Component]:
    return [Component("single-turn", "relax_core.sampling.episode:SingleTurn", "One answer to one prompt")]


@hook
def relax_rewards() -> list[Component]:
    return [
        Component("function", "relax_core.rewards.functions:FunctionReward", "A function in a Python file or module")
    ]


@hook
def relax_task_sources() -> list[Component]:
    return [
        Component("files", "relax_core.data.task_files:Files", "JSON lines, Parquet or a dataset folder, by its path"),
        Component("jsonl", "relax_core.data.task_files:JsonLines", "JSON lines: prompt, answer, other columns"),
        Component(
            "table", "relax_core.data.task_files:TableSource", "Parquet files, and folders that `datasets` saved"
        ),
    ]


@hook
def relax_samplers() -> list[Component]:
    return [Component("shuffle", "relax_core.sampling.groups:Shuffle", "Every task once an epoch, in seeded order")]


@hook
def relax_buses() -> list[Component]:
    return [
        Component("in-process", "relax_core.bus.store:InProcessBus", "Keeps rows in the memory of the controller"),
        Component("ray", "relax_core.runners.ray.bus:RayBus", "Keeps rows in separate Ray actors"),
    ]


@hook
def relax_weight_transports() -> list[Component]:
    return [
        Component(
            "shared-memory", "relax_core.tensor_files.transport:SharedMemory", "One host, through memory-backed files"
        ),
        Component("disk", "relax_core.tensor_files.transport:Disk", "Any hosts, through a shared directory"),
    ]


@hook
def relax_roles() -> list[Component]:
    return [
        Component("rollout", "relax_core.roles.rollout:Rollout", "Generates and judges samples"),
        Component("source", "relax_core.roles.source:RowSource", "Puts the rows of a dataset on the bus"),
        Component("advantages", "relax_core.roles.forward:AdvantagesRole", "Computes advantages within groups"),
        Component("teacher", "relax_core.roles.teacher:Teacher", "Log-probs of fixed models on the policy's rows"),
        Component("critic", "relax_core.roles.critic:Critic", "Estimates token values; trains on the actor's rows"),
        Component("reference", "relax_core.roles.forward:Reference", "Log-probs under fixed weights"),
        Component("actor-fwd", "relax_core.roles.forward:ActorForward", "Log-probs under the step's starting weights"),
        Component("actor", "relax_core.roles.actor:Actor", "Trains the policy and publishes it"),
    ]
