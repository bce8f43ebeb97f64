# SPDX-License-Identifier: Apache-2.0
"""Loading of plugins, and the contract between a component class and its kind.

Installed plugins are imported one at a time and asked for their components. A failure is stored in the plugin's record;
only a file that the configuration names raises. Pluggy checks hook signatures. Its bulk loader silently drops a second
distribution of the same name, and one broken plugin aborts it, so it is not used.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import isfunction, signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import pluggy

from relax_core.api import events, hooks
from relax_core.api.command import KEBAB, TARGET
from relax_core.api.component import BY_HOOK, BY_TABLE, CORE_KEYS, KINDS, Component, Configurable, Kind
from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.files import import_file, module_name
from relax_core.registry.error_text import did_you_mean, plugin_frames, said
from relax_core.registry.handshake import Offered, PluginState, Record

if TYPE_CHECKING:
    from relax_core.api.options import Options, TableOptions


_MARK = f"{hooks.PROJECT}_impl"
SPECIFIED = tuple(name for name in vars(hooks) if name.startswith("relax_"))
PARTS = tuple(name for name in SPECIFIED if vars(hooks)[name].relax_spec["firstresult"])
"""Hooks that return the part of a run that one plugin implements."""

HOOKS: dict[type, str] = {
    events.RunOpened: "relax_run_opened",
    events.RunStarted: "relax_run_started",
    events.SamplesScored: "relax_samples_scored",
    events.StepFinished: "relax_step_finished",
    events.WeightsPublished: "relax_weights_published",
    events.CheckpointSaved: "relax_checkpoint_saved",
    events.ExportSaved: "relax_export_saved",
    events.RolesReported: "relax_roles_reported",
    events.EvalFinished: "relax_eval_finished",
    events.RoleFailed: "relax_role_failed",
    events.RoleRecovered: "relax_role_recovered",
    events.GuardFired: "relax_guard_fired",
    events.RolledBack: "relax_rolled_back",
    events.RunRestarted: "relax_run_restarted",
    events.WorkRetried: "relax_work_retried",
    events.RunFinished: "relax_run_finished",
    events.RunClosed: "relax_run_closed",
}
"""event type -> observer hook; observers do not get events of types that are not listed."""


class Loader:
    """A loader of records; `manager` holds the modules of all plugins that loaded, for their observer hooks."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(hooks.PROJECT)
        self.manager.add_hookspecs(hooks)
        self._owner: dict[str, Record] = {}

    def load(self, record: Record) -> Record:
        """Import a plugin and return its record with its components, or with the reason why it is broken."""
        if record.state is not PluginState.OK or not record.module:
            return record
        if record.module in self._owner:
            other = self._owner[record.module].title
            return replace(record, state=PluginState.BROKEN, reason=f"{other} has the same module {record.module}")
        try:
            return self.adopt(record, importlib.import_module(record.module))
        except (Exception, SystemExit) as error:
            return replace(record, state=PluginState.BROKEN, reason=said(error), frames=plugin_frames(error))

    def adopt(self, record: Record, module: ModuleType) -> Record:
        """Register an imported module and return its record with its components; raise an error for a faulty module."""
        for name, value in vars(module).items():  # an unmarked function with a hook's name would be ignored silently
            if not name.startswith("relax_") or not callable(value) or getattr(value, _MARK, None):
                continue
            if getattr(value, "__module__", "") == module.__name__:
                raise ValueError(f"{name} is not marked as a hook; put @hook (relax_core.api) above it, or rename it")
        self.manager.register(module, name=f"{record.distribution}:{record.module}")
        try:
            offered = tuple(self._offered(module))
        except BaseException:
            self.manager.unregister(module)
            raise
        self._owner[record.module] = record
        callers = self.manager.get_hookcallers(module) or ()
        observed = sorted(caller.name for caller in callers if caller.name not in (*BY_HOOK, *PARTS))
        parts = tuple(caller.name for caller in callers if caller.name in PARTS)
        return replace(record, components=offered, hooks=tuple(observed), parts=parts)

    def _offered(self, module: ModuleType) -> Iterator[Offered]:
        for caller in self.manager.get_hookcallers(module) or ():
            if not caller.has_spec():
                raise ValueError(f"unknown hook {caller.name}; {did_you_mean(caller.name, SPECIFIED)}")
            if kind := BY_HOOK.get(caller.name):
                own = [impl for impl in caller.get_hookimpls() if impl.plugin is module]
                for impl in own:
                    yield from (Offered(kind.name, item) for item in checked(kind, impl.function()))


def checked(kind: Kind, offered: object) -> list[Component]:
    """Return the entries that the hook of a kind returned; raise TypeError or ValueError for a faulty name or target."""
    hook, entry = kind.hook, kind.entry.__name__
    if not isinstance(offered, Iterable):
        raise TypeError(f"{hook} returned {offered!r}; it must return a list of {entry}s")
    components: list[Component] = []
    for item in offered:
        if not isinstance(item, kind.entry):
            raise TypeError(f"{hook} returned {item!r}; it must return {entry}(name, target, help)")
        if not KEBAB.fullmatch(item.name):
            raise ValueError(f"{hook} offers the name {item.name!r}; write it in kebab-case")
        if not TARGET.fullmatch(item.target):
            raise ValueError(f"{hook} offers {item.name} with target {item.target!r}; write package.module:Class")
        if kind.name == "table":
            _refuse_core_key(item.name)
        components.append(item)
    twice = [name for name, count in Counter(item.name for item in components).items() if count > 1]
    if twice:
        raise ValueError(f"{hook} offers {twice[0]} twice; names are unique per kind")
    return components


def _refuse_core_key(table: str) -> None:
    if table in CORE_KEYS or table in BY_TABLE:
        raise ValueError(f"the plugin offers the table [{table}], which is a key of the core; choose another name")


def load_file(loader: Loader, path: str) -> Record:
    """Import one file as a plugin that offers the file's component classes and the components of its hooks.

    A single class is named after the file; several classes keep their own names, in kebab-case. Raises ConfigError if
    the file does not exist, and PluginError if its import fails or it offers no component or hook.
    """
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError("plugins", repr(path), "name an existing .py file")
    record = Record(file.name, file.name, "", module_name(file), str(file), file=True)
    try:
        module = import_file(record.module, file)
        loaded = loader.adopt(record, module)
        loaded = replace(loaded, components=loaded.components + tuple(_classes(module, file, loaded)))
    except (Exception, SystemExit) as error:
        message = f"the plugin cannot be loaded: {said(error)}; correct the file, or remove it from `plugins`"
        raise PluginError(str(file), message, plugin_frames(error)) from error
    if not (loaded.components or loaded.hooks or loaded.parts):
        raise PluginError(
            str(file), "the file defines no component class and no hook; subclass a base of relax_core.api"
        )
    return loaded


def _classes(module: ModuleType, file: Path, loaded: Record) -> Iterator[Offered]:
    """Yield the file's own concrete component classes, except classes that its hooks return."""
    hooked = {component.target.rpartition(":")[2] for _, component in loaded.components}
    classes = [value for name, value in vars(module).items() if name not in hooked and _is_component(value, module)]
    for value in classes:
        name = kebab(file.stem if len(classes) == 1 else value.__name__)
        if value.kind == "table":
            _refuse_core_key(name)
        help_line = (value.__doc__ or "").strip().partition("\n")[0]
        yield Offered(value.kind, Component(name, f"{module.__name__}:{value.__name__}", help_line))


def _is_component(value: object, module: ModuleType) -> bool:
    from relax_core.api.options import TableOptions

    if not isinstance(value, type) or not issubclass(value, (Configurable, TableOptions)):
        return False
    is_own = value.__module__ == module.__name__ and not value.__name__.startswith("_")
    return is_own and value.kind in KINDS and not missing_methods(value)


def kebab(name: str) -> str:
    """Return a name in kebab-case: `my-reward` for `MyReward` and `my_reward`, `http-reward` for `HTTPReward`."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name)
    return re.sub(r"[^a-z0-9]+", "-", split.lower()).strip("-")


def missing_methods(cls: type) -> list[str]:
    """Return the names of abstract methods that the class does not define."""
    return [name for name in dir(cls) if getattr(getattr(cls, name, None), "__isabstractmethod__", False)]


def import_target(target: str) -> object:
    """Import and return the object that `package.module:Name` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def contract_violation(kind: Kind, target: object) -> str:
    """Return why an object does not meet the contract of a kind; empty if it does."""
    if not kind.base:
        takes_facts = isfunction(target) and len(signature(target).parameters) == 1
        return "" if takes_facts else f"its target is {target!r}; name a function with one parameter, `facts`"
    base = import_target(kind.base)
    if not isinstance(target, type):
        return f"its target is {type(target).__name__}, not a class; name a subclass of {kind.base}"
    if not isinstance(base, type):
        raise TypeError(f"the table of kinds names {base!r}, which is not a class")
    root = next(cls for cls in base.__mro__ if "kind" in vars(cls))  # rewards have several bases with one root
    if not issubclass(target, root):
        return f"{target.__name__} is not a component of kind {kind.name}; derive it from {kind.base}"
    if kind.name == "table":
        return _faulty_keys(cast("type[TableOptions]", target))
    if missing := missing_methods(target):
        return f"{target.__name__} does not define {', '.join(missing)}; implement all abstract methods of {kind.base}"
    return next(_other_signatures(target), "")


def _faulty_keys(table: type[TableOptions]) -> str:
    """Return an error for a table with a required key, or with an unknown key in `may_change`; empty for a sound table."""
    required = [name for name, field in table.model_fields.items() if field.is_required()]
    if required:
        return (
            f"{table.__name__} requires {', '.join(required)}; give each key a default: configurations omit the table"
        )
    unknown = sorted(set(table.may_change) - {"*", *table.model_fields})
    return f"{table.__name__}.may_change names {', '.join(unknown)}; name keys of the table" if unknown else ""


def _other_signatures(target: type) -> Iterator[str]:
    """Yield an error for each method that cannot be called with the parameters of the base's abstract method."""
    for base in target.__mro__:
        for name, asked in vars(base).items():
            written = getattr(target, name)
            if not (getattr(asked, "__isabstractmethod__", False) and isfunction(asked) and isfunction(written)):
                continue
            parameters = signature(asked).parameters.values()
            by_name = {each.name: None for each in parameters if each.kind is each.KEYWORD_ONLY}
            in_order = [None for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
            try:
                signature(written).bind(*in_order, **by_name)
            except TypeError as error:
                given = f"{target.__name__}.{name}{signature(written)}"
                yield (
                    f"{given} cannot be called as {base.__name__}.{name}{signature(asked)}: {error}; "
                    "write it with these parameters"
                )


def build_options(model: type[Options], options: Mapping[str, Any], field: str) -> Options:
    """Build options from plain data; raise ConfigError with the first faulty key, its value and a fix."""
    from pydantic import ValidationError

    try:
        return model.model_validate(dict(options))
    except ValidationError as failed:
        first, *rest = failed.errors(include_url=False)
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            fix = f"no such option exists; {did_you_mean(str(first['loc'][0]), model.model_fields)}"
        elif first["type"] == "missing":
            fix = "set a value"
        else:
            message = first["msg"].removeprefix("Value error, ")
            fix = message[:1].lower() + message[1:]
        path = ".".join([field, *(str(part) for part in first["loc"])])
        got = "nothing" if first["type"] == "missing" else repr(first["input"])
        raise ConfigError(path, got, fix + (f" (and {len(rest)} more)" if rest else "")) from None
