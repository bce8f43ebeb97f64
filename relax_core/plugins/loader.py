# SPDX-License-Identifier: Apache-2.0
"""Imports plugins one at a time and asks them what they offer; a failure becomes the record's own, never the caller's.

Pluggy checks hook signatures and finds hooks that no specification knows; its bulk loader is not used, because it
drops the second distribution of one name in silence and lets one broken plugin abort all.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import ModuleType

import pluggy

from relax_core.api import hooks
from relax_core.api.component import Component
from relax_core.api.kinds import BY_HOOK
from relax_core.plugins.frames import plugin_frames, said
from relax_core.plugins.nearest import did_you_mean
from relax_core.plugins.record import Offered, Record, State

KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_MARK = f"{hooks.PROJECT}_impl"


class Loader:
    """Loads records; afterwards `manager` holds the modules of all that are ok, for their observer hooks."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(hooks.PROJECT)
        self.manager.add_hookspecs(hooks)
        self._owner: dict[str, Record] = {}

    def load(self, record: Record) -> Record:
        """The record with what the plugin offers, or with why it is broken."""
        if record.state is not State.OK:
            return record
        if record.module in self._owner:
            other = self._owner[record.module].title
            return replace(record, state=State.BROKEN, reason=f"{other} has the same module {record.module}")
        try:
            return self.adopt(record, importlib.import_module(record.module))
        except (Exception, SystemExit) as error:
            return broken(record, error)

    def adopt(self, record: Record, module: ModuleType) -> Record:
        """Register an imported module and collect its components; raises what is wrong with it."""
        check_marks(module)
        self.manager.register(module, name=f"{record.distribution}:{record.module}")
        try:
            offered = tuple(self._offered(module))
        except BaseException:
            self.manager.unregister(module)
            raise
        self._owner[record.module] = record
        return replace(record, components=offered, hooks=tuple(sorted(self._observed(module))))

    def _offered(self, module: ModuleType) -> Iterator[Offered]:
        for caller in self.manager.get_hookcallers(module) or ():
            if not caller.has_spec():
                raise ValueError(f"unknown hook {caller.name}; {did_you_mean(caller.name, SPECIFIED)}")
            if kind := BY_HOOK.get(caller.name):
                own = [impl for impl in caller.get_hookimpls() if impl.plugin is module]
                for impl in own:
                    yield from (Offered(kind.name, item) for item in checked(caller.name, impl.function()))

    def _observed(self, module: ModuleType) -> Iterator[str]:
        callers = self.manager.get_hookcallers(module) or ()
        return (caller.name for caller in callers if caller.name not in BY_HOOK)


SPECIFIED = tuple(name for name in vars(hooks) if name.startswith("relax_"))


def broken(record: Record, error: BaseException) -> Record:
    """The record of a plugin whose own code failed."""
    return replace(record, state=State.BROKEN, reason=said(error), frames=plugin_frames(error))


def check_marks(module: ModuleType) -> None:
    """Refuse functions that are named like hooks and are none: they would be ignored in silence."""
    for name, value in vars(module).items():
        if not name.startswith("relax_") or not callable(value) or getattr(value, _MARK, None):
            continue
        if getattr(value, "__module__", "") == module.__name__:
            raise ValueError(f"{name} is not marked; put @hook (relax_core.api) above it or rename it")


def checked(hook: str, offered: object) -> list[Component]:
    """What a component hook returned, refused where a name or a target can't work."""
    if not isinstance(offered, Iterable):
        raise TypeError(f"{hook} returned {offered!r}; it must return a list of Components")
    components: list[Component] = []
    for item in offered:
        if not isinstance(item, Component):
            raise TypeError(f"{hook} returned {item!r}; it must return Component(name, target, help)")
        if not KEBAB.fullmatch(item.name):
            raise ValueError(f"{hook} offers the name {item.name!r}; write it in kebab-case")
        if not _TARGET.fullmatch(item.target):
            raise ValueError(f"{hook} offers {item.name} with target {item.target!r}; write package.module:Class")
        components.append(item)
    twice = [name for name, count in Counter(item.name for item in components).items() if count > 1]
    if twice:
        raise ValueError(f"{hook} offers {twice[0]} twice; names are unique per kind")
    return components
