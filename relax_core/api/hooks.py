# SPDX-License-Identifier: Apache-2.0
"""The hook specifications: all that a plugin can implement, on one screen.

Component hooks return `Component`s (strings only). Observer hooks receive one frozen event in the controller,
under a deadline; they never change data, and an observer that raises three times is off.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from relax_core.api import events
from relax_core.api.component import Component

PROJECT = "relax"
hookspec = pluggy.HookspecMarker(PROJECT)
hook = pluggy.HookimplMarker(PROJECT)
"""Decorates a plugin's implementations: `from relax_core.api import hook`."""

Components = Iterable[Component]


# fmt: off
@hookspec
def relax_algorithms() -> Components: """Advantages and losses."""  # type: ignore[empty-body]
@hookspec
def relax_rewards() -> Components: """Judges of trajectories."""  # type: ignore[empty-body]
@hookspec
def relax_environments() -> Components: """Return environments, which answer the policy."""  # type: ignore[empty-body]
@hookspec
def relax_modality_processors() -> Components: """Image, video and audio to tensors."""  # type: ignore[empty-body]
@hookspec
def relax_inference_backends() -> Components: """Engines."""  # type: ignore[empty-body]
@hookspec
def relax_training_backends() -> Components: """Trainers."""  # type: ignore[empty-body]
@hookspec
def relax_model_families() -> Components: """Templates and placeholders of models."""  # type: ignore[empty-body]
@hookspec
def relax_task_sources() -> Components: """Readers of task files."""  # type: ignore[empty-body]
@hookspec
def relax_samplers() -> Components: """Order of tasks."""  # type: ignore[empty-body]
@hookspec
def relax_filters() -> Components: """Register the rules by which groups are kept."""  # type: ignore[empty-body]
@hookspec
def relax_sinks() -> Components: """Register places that metrics go to."""  # type: ignore[empty-body]
@hookspec
def relax_buses() -> Components: """Register ways in which rows travel."""  # type: ignore[empty-body]
@hookspec
def relax_weight_transports() -> Components: """Register ways in which weights travel."""  # type: ignore[empty-body]
@hookspec
def relax_scaling_policies() -> Components: """Register rules for the number of engines."""  # type: ignore[empty-body]
@hookspec
def relax_sandboxes() -> Components: """Register places that programs run in which nobody trusts."""  # type: ignore[empty-body]
@hookspec
def relax_roles() -> Components: """Further roles of the graph."""  # type: ignore[empty-body]

@hookspec
def relax_run_started(event: events.RunStarted) -> None: """The run directory exists and roles are ready."""
@hookspec
def relax_samples_scored(event: events.SamplesScored) -> None: """Groups were judged."""
@hookspec
def relax_step_finished(event: events.StepFinished) -> None: """A step was trained and committed."""
@hookspec
def relax_weights_published(event: events.WeightsPublished) -> None: """Every live receiver has a version."""
@hookspec
def relax_checkpoint_saved(event: events.CheckpointSaved) -> None: """A checkpoint is complete on disk."""
@hookspec
def relax_eval_finished(event: events.EvalFinished) -> None: """An evaluation set was judged."""
@hookspec
def relax_role_failed(event: events.RoleFailed) -> None: """A role or worker failed."""
@hookspec
def relax_role_recovered(event: events.RoleRecovered) -> None: """Observe that a role works again."""
@hookspec
def relax_guard_fired(event: events.GuardFired) -> None: """A guard found evidence that training diverges."""
@hookspec
def relax_rolled_back(event: events.RolledBack) -> None: """The trainer went back to a version."""
@hookspec
def relax_run_restarted(event: events.RunRestarted) -> None: """The whole run starts again from a checkpoint."""
@hookspec
def relax_work_retried(event: events.WorkRetried) -> None: """Work is done once more after a fault that is not its own."""
@hookspec
def relax_run_finished(event: events.RunFinished) -> None: """The last event of a run."""
# fmt: on
