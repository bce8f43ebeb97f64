# SPDX-License-Identifier: Apache-2.0
"""The components that this distribution offers. They are named by strings only: listing them imports nothing heavy."""

from relax_core.api.component import Component
from relax_core.api.hooks import hook


@hook
def relax_environments() -> list[Component]:
    return [Component("single-turn", "relax_core.sampling.episode:SingleTurn", "One answer to one prompt")]


@hook
def relax_task_sources() -> list[Component]:
    return [
        Component(
            "files", "relax_core.data.task_files:Files", "JSON lines, Parquet or a dataset folder, as the path says"
        ),
        Component("jsonl", "relax_core.data.task_files:JsonLines", "JSON lines: prompt, answer, other columns"),
        Component(
            "table", "relax_core.data.task_files:TableSource", "Parquet files, and folders that `datasets` saved"
        ),
    ]


@hook
def relax_samplers() -> list[Component]:
    return [Component("shuffle", "relax_core.sampling.groups:Shuffle", "Every task once an epoch, in seeded order")]


@hook
def relax_model_families() -> list[Component]:
    return [Component("chat", "relax_core.data.chat:ChatFamily", "Any model with a tokenizer.json and a chat template")]


@hook
def relax_buses() -> list[Component]:
    return [
        Component("in-process", "relax_core.bus.store:InProcessBus", "In the controller's memory"),
        Component("ray", "relax_core.runners.ray.bus:RayBus", "Payloads in Ray actors of their own"),
    ]


@hook
def relax_weight_transports() -> list[Component]:
    return [
        Component(
            "shared-memory", "relax_core.tensor_files.transport:SharedMemory", "One host, through memory-backed files"
        ),
        Component("disk", "relax_core.tensor_files.transport:Disk", "A directory that every host sees"),
    ]


@hook
def relax_roles() -> list[Component]:
    return [
        Component("rollout", "relax_core.roles.rollout:Rollout", "Generates and judges samples"),
        Component("source", "relax_core.roles.source:RowSource", "Hands out rows of a dataset"),
        Component("advantages", "relax_core.roles.forward:AdvantagesRole", "Credits samples within their groups"),
        Component("teacher", "relax_core.roles.teacher:Teacher", "What fixed models think of the policy's rows"),
        Component("critic", "relax_core.roles.critic:Critic", "Values tokens and learns from the actor's rows"),
        Component("reference", "relax_core.roles.forward:Reference", "Log-probs under fixed weights"),
        Component("actor-fwd", "relax_core.roles.forward:ActorForward", "Log-probs under the step's starting weights"),
        Component("actor", "relax_core.roles.actor:Actor", "Trains the policy and publishes it"),
    ]
