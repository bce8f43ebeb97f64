# SPDX-License-Identifier: Apache-2.0
"""The specifications of all hooks that a plugin can implement.

Component hooks return `Component`s, `Table`s or `Check`s, which name classes and functions by strings. Observer hooks
receive a frozen event in the controller process, under a deadline; an observer that raises three times is paused, like a
sink. One thread makes all calls of an observer about a run. A part hook returns a part of the run that exactly one plugin
implements; a configuration that needs the part is refused if no plugin does. Commands of `relax` need no hook: the
entry points of the group `relax.commands` name them (`relax_core.api.command`), so that `relax --help` imports no plugin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pluggy

from relax_core.api import events
from relax_core.api.component import Check, Component, Table

if TYPE_CHECKING:
    from relax_core.api.component import Chosen
    from relax_core.api.engine import Engine
    from relax_core.api.options import Secret
    from relax_core.api.role import Clock, Workers
    from relax_core.api.scaling import Autoscaler, ScalingPolicy
    from relax_core.api.scaling_limits import ScalingLimits

PROJECT = "relax"
hookspec = pluggy.HookspecMarker(PROJECT)
hook = pluggy.HookimplMarker(PROJECT)
"""The decorator of a hook's implementation in a plugin: `from relax_core.api import hook`."""

Components = Iterable[Component]


# fmt: off
@hookspec
def relax_algorithms() -> Components: """Return algorithms: advantages and losses."""  # type: ignore[empty-body]
@hookspec
def relax_rewards() -> Components: """Return rewards, which judge trajectories."""  # type: ignore[empty-body]
@hookspec
def relax_environments() -> Components: """Return environments, which answer the policy."""  # type: ignore[empty-body]
@hookspec
def relax_modality_processors() -> Components: """Return processors of image, video or audio."""  # type: ignore[empty-body]
@hookspec
def relax_inference_backends() -> Components: """Return engines, which sample tokens."""  # type: ignore[empty-body]
@hookspec
def relax_training_backends() -> Components: """Return trainers."""  # type: ignore[empty-body]
@hookspec
def relax_model_families() -> Components: """Return model families, which render chats."""  # type: ignore[empty-body]
@hookspec
def relax_task_sources() -> Components: """Return readers of task files."""  # type: ignore[empty-body]
@hookspec
def relax_samplers() -> Components: """Return samplers, which choose the next task."""  # type: ignore[empty-body]
@hookspec
def relax_filters() -> Components: """Return filters, which drop finished groups."""  # type: ignore[empty-body]
@hookspec
def relax_sinks() -> Components: """Return sinks, which receive metrics."""  # type: ignore[empty-body]
@hookspec
def relax_buses() -> Components: """Return stores for the rows on the bus."""  # type: ignore[empty-body]
@hookspec
def relax_weight_transports() -> Components: """Return transports of published weights."""  # type: ignore[empty-body]
@hookspec
def relax_scaling_policies() -> Components: """Return rules for the number of engines."""  # type: ignore[empty-body]
@hookspec
def relax_sandboxes() -> Components: """Return sandboxes for untrusted programs."""  # type: ignore[empty-body]
@hookspec
def relax_roles() -> Components: """Return roles: parts of a run's logic."""  # type: ignore[empty-body]
@hookspec
def relax_tables() -> Iterable[Table]: """Return configuration tables of the plugin."""  # type: ignore[empty-body]
@hookspec
def relax_checks() -> Iterable[Check]: """Return checks of runs."""  # type: ignore[empty-body]

@hookspec(firstresult=True)
def relax_autoscaler(policy: ScalingPolicy, limits: ScalingLimits, min_engines: int) -> Autoscaler:
    """Return a scaling policy within the limits of `[autoscale]`; `min_engines`: the oldest engines, which never leave."""
    raise NotImplementedError
@hookspec(firstresult=True)
def relax_media_pipeline() -> str: """Return the `MediaPipeline` of runs as `package.module:Class`."""  # type: ignore[empty-body]

@hookspec(firstresult=True)
def relax_external_workers(
    address: str, token: Secret, engine: Chosen, kind: type[Engine], plugins: Sequence[tuple[str, ...]], clock: Clock
) -> Workers:
    """Return workers that connect to one engine that was started elsewhere, at `HOST:PORT`, instead of starting a process.

    `engine`, `kind`: the engine of the pool that the other engine joins, and its class. `plugins`: name, version and
    content of the plugins of the run.
    """
    raise NotImplementedError

@hookspec
def relax_run_opened(event: events.RunOpened) -> events.WorkAtEnd | None:
    """Observe that a start of the run begins; return work of the observer for which the run waits at its end."""
@hookspec
def relax_run_started(event: events.RunStarted) -> None: """Observe that all roles of the run are ready."""
@hookspec
def relax_samples_scored(event: events.SamplesScored) -> None: """Observe that groups of samples were judged."""
@hookspec
def relax_step_finished(event: events.StepFinished) -> None: """Observe that a step was trained and committed."""
@hookspec
def relax_weights_published(event: events.WeightsPublished) -> None: """Observe that engines loaded a version."""
@hookspec
def relax_checkpoint_saved(event: events.CheckpointSaved) -> None: """Observe that a checkpoint is complete on disk."""
@hookspec
def relax_export_saved(event: events.ExportSaved) -> None: """Observe that an export of the model is complete on disk."""
@hookspec
def relax_roles_reported(event: events.RolesReported) -> None: """Observe the states and waits of the roles."""
@hookspec
def relax_eval_finished(event: events.EvalFinished) -> None: """Observe that an evaluation set was judged."""
@hookspec
def relax_role_failed(event: events.RoleFailed) -> None: """Observe that a role or worker failed."""
@hookspec
def relax_role_recovered(event: events.RoleRecovered) -> None: """Observe that a role works again."""
@hookspec
def relax_guard_fired(event: events.GuardFired) -> None: """Observe that a guard found evidence of divergence."""
@hookspec
def relax_rolled_back(event: events.RolledBack) -> None: """Observe that the trainer went back to an earlier version."""
@hookspec
def relax_run_restarted(event: events.RunRestarted) -> None: """Observe that the whole run restarts."""
@hookspec
def relax_work_retried(event: events.WorkRetried) -> None: """Observe that work is repeated after a fault elsewhere."""
@hookspec
def relax_run_finished(event: events.RunFinished) -> None: """Observe the end of a run and its summary."""
@hookspec
def relax_run_closed(event: events.RunClosed) -> None: """Observe that all files of the run are complete."""
# fmt: on
