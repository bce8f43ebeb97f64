# SPDX-License-Identifier: Apache-2.0
"""Observers: plugins that are told what happens. They change no data, and one that raises three times is off.

The deadline is the controller's: it calls `notify` where it can stop waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pluggy

from relax_core.api import events

STRIKES = 3
Failed = Callable[[str, Exception, bool], None]
"""(distribution, error, whether it is off now)."""

HOOKS: dict[type, str] = {
    events.RunStarted: "relax_run_started",
    events.SamplesScored: "relax_samples_scored",
    events.StepFinished: "relax_step_finished",
    events.WeightsPublished: "relax_weights_published",
    events.CheckpointSaved: "relax_checkpoint_saved",
    events.EvalFinished: "relax_eval_finished",
    events.RoleFailed: "relax_role_failed",
    events.RoleRecovered: "relax_role_recovered",
    events.RunFinished: "relax_run_finished",
}
"""Event -> hook; other events are the controller's own business."""


class Observers:
    """Who listens to which hook."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager
        self._strikes: Counter[str] = Counter()

    def plugins(self) -> dict[str, object]:
        """Plugins that implement some observer hook, by name."""
        hooks = set(HOOKS.values())
        return {
            name: plugin
            for name, plugin in self._manager.list_name_plugin()
            if any(caller.name in hooks for caller in self._manager.get_hookcallers(plugin) or ())
        }

    def calls(self, hook_name: str) -> tuple[tuple[str, Callable[..., object]], ...]:
        """(distribution, callable taking `event=`) of each observer that is still on."""
        caller = getattr(self._manager.hook, hook_name)
        listening = ((impl.plugin_name.partition(":")[0], impl) for impl in caller.get_hookimpls())
        return tuple((dist, _calling(impl)) for dist, impl in listening if self._strikes[dist] < STRIKES)

    def notify(self, hook_name: str, event: events.Event, failed: Failed) -> None:
        """Tell each observer in turn; its error goes to `failed`, and the third one switches it off."""
        for dist, call in self.calls(hook_name):
            try:
                call(event=event)
            except Exception as error:
                self._strikes[dist] += 1
                failed(dist, error, self._strikes[dist] >= STRIKES)


def _calling(impl: pluggy.HookImpl) -> Callable[..., object]:
    """An implementation may leave out arguments that it does not need."""

    def call(**arguments: object) -> object:
        return impl.function(*(arguments[name] for name in impl.argnames))

    return call
