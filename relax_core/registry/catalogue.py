# SPDX-License-Identifier: Apache-2.0
"""The catalogue of all components that a run can use, found by kind and name, and imported only when chosen.

The error for a name that no loaded plugin offers gives the cause: the plugin is broken, switched off or not installed,
the component is of another kind, or the name is mistyped.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast, overload

from relax_core.api.component import KINDS, Component, Configurable, ContractT, Kind
from relax_core.api.errors import ConfigError, PluginError, RelaxError
from relax_core.registry.error_text import did_you_mean, nearest, plugin_frames, said
from relax_core.registry.handshake import (
    CORE,
    DENY,
    Offered,
    PluginState,
    Record,
    ResolvedPlugin,
    canonical,
    compare,
    find_module,
    resolve,
)
from relax_core.registry.installed import installed
from relax_core.registry.loader import HOOKS, Loader, build_options, contract_violation, import_target, load_file

if TYPE_CHECKING:
    from relax_core.api.component import Chosen
    from relax_core.api.events import Event
    from relax_core.api.options import TableOptions


COMPOUNDS = {"algorithm": "relax_core.learn.groups:MixedAlgorithm"}
"""kind -> class that combines several components of the kind into one component."""
PYTHON = "python"
"""Distribution name of components that were passed from Python."""


@dataclass(frozen=True, slots=True)
class Found:
    """A component with the plugin that offers it."""

    component: Component
    distribution: str
    version: str
    location: str
    plugin: str
    """Name of the plugin's entry point or file."""

    @property
    def title(self) -> str:
        return f"{self.component.name!r} of {self.distribution} {self.version}".rstrip()


class Catalogue:
    """Components by kind and name; `Catalogue.load()` reads the installed plugins."""

    def __init__(self, records: Sequence[Record], loader: Loader) -> None:
        self._records = _with_notes(records)
        self._loader = loader
        self._passed: dict[tuple[str, str], type[Configurable]] = {}
        self._functions: dict[str, object] = {}
        """Observers passed from Python, by name."""
        self._conforming: set[tuple[str, object]] = set()
        """(kind, class) pairs that have passed the check of the kind's contract."""

    @classmethod
    def load(cls, files: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Catalogue:
        """Load installed plugins and these files; a broken plugin becomes a record, a broken file raises an error."""
        loader = Loader()
        records = [loader.load(record) for record in installed(os.environ if environ is None else environ)]
        records += [load_file(loader, path) for path in dict.fromkeys(files)]
        return cls(records, loader)

    def add(self, kind: str, name: str, cls: type[Configurable]) -> None:
        """Register a class of this process, replacing an earlier class of the same kind and name."""
        if reason := contract_violation(known_kind(kind), cls):
            raise PluginError(f"{kind} {name!r} passed from Python", reason)
        self._passed[kind, name] = cls

    @property
    def records(self) -> tuple[Record, ...]:
        """All plugins, each with its state."""
        if not self._passed:
            return self._records
        offered = tuple(
            Offered(
                kind, Component(name, f"{cls.__module__}:{cls.__qualname__}", (cls.__doc__ or "").partition("\n")[0])
            )
            for (kind, name), cls in self._passed.items()
        )
        return (*self._records, Record(PYTHON, PYTHON, "", "", "", components=offered))

    def names(self, kind: str) -> tuple[str, ...]:
        """Return all component names of a kind."""
        known_kind(kind)
        offered = (offered for record in self.records for offered in record.components)
        return tuple(sorted({component.name for of, component in offered if of == kind}))

    def all(self, kind: str) -> tuple[Found, ...]:
        """Return all components of a kind, without importing their classes."""
        return tuple(
            Found(component, record.distribution, record.version, record.location, record.name)
            for record in self.records
            for of, component in record.components
            if of == kind
        )

    def find(self, kind: str, name: str) -> Found:
        """Return the component with this name, or `distribution:name`, without importing its class."""
        table = known_kind(kind)
        wanted, bare = _split(kind, name)
        matches = [
            each
            for each in self.all(kind)
            if each.component.name == bare and wanted in ("", each.distribution, each.plugin)
        ]
        if not matches:
            raise missing(table, name, self.records)
        if len(matches) > 1:
            same = len({f.distribution for f in matches}) < len(matches)
            written = " or ".join(f"{f.plugin if same else f.distribution}:{bare}" for f in matches)
            fix = f"several plugins have this name; write {written}"
            if kind == "table":
                titles = " and ".join(each.title for each in matches)
                fix = f"several plugins have this table: {titles}; uninstall one, or name it in {DENY}"
            raise ConfigError(table.table or kind, repr(name), fix)
        return matches[0]

    def table(self, name: str) -> type[TableOptions]:
        """Import the class of a plugin's configuration table."""
        return cast("type[TableOptions]", self.target("table", name))

    def tables(self) -> dict[str, type[TableOptions]]:
        """Return the class of each table of the loaded plugins; leave out tables that cannot be imported."""
        tables = {}
        for name in self.names("table"):
            with suppress(RelaxError):
                tables[name] = self.table(name)
        return tables

    def target(self, kind: str, name: str) -> type[Configurable]:
        """Import the component's class, or a check's function, and check it against the contract of its kind."""
        found = self.find(kind, name)
        cls = self._passed.get((kind, found.component.name)) if found.distribution == PYTHON else None
        try:
            target = cls or import_target(found.component.target)
        except (Exception, SystemExit) as error:
            _refuse_missing_package(kind, name, found, error)
            message = f"cannot import {found.component.target}: {said(error)}"
            raise PluginError(f"{kind} {found.title}", message, plugin_frames(error)) from error
        reason = "" if (kind, target) in self._conforming else contract_violation(known_kind(kind), target)
        if reason:
            raise PluginError(f"{kind} {found.title}", reason)
        self._conforming.add((kind, target))
        return cast(type[Configurable], target)

    @overload
    def build(self, chosen: Chosen) -> Configurable: ...

    @overload
    def build(self, chosen: Chosen, contract: type[ContractT]) -> ContractT: ...

    def build(self, chosen: Chosen, contract: type[Any] = Configurable) -> Configurable:
        """Build an instance with validated options; for a choice of several parts, build their combination.

        `contract` only informs type checkers: each class is checked against its kind when imported.
        """
        if chosen.parts:
            whole: Any = import_target(COMPOUNDS[chosen.kind])
            return cast(Configurable, whole.of([(part.name, self.build(part)) for part in chosen.parts]))
        cls = self.target(chosen.kind, chosen.name)
        with self.authored(chosen, "cannot be built"):
            return cls(build_options(cls.options_model(), chosen.options, f"{chosen.kind}.{chosen.name}"))

    @contextmanager
    def authored(self, chosen: Chosen, failed: str = "is not ready") -> Iterator[None]:
        """Charge the author of a component for an exception or an exit of the body: raise PluginError.

        Raises ConfigError instead if a package is missing that an extra of the component's distribution installs.
        """
        try:
            yield
        except RelaxError:
            raise
        except (Exception, SystemExit) as error:
            found = self.find(chosen.kind, chosen.name)
            _refuse_missing_package(chosen.kind, chosen.name, found, error)
            message = f"{failed}: {said(error)}"
            raise PluginError(f"{chosen.kind} {found.title}", message, plugin_frames(error)) from error

    def observers(self) -> dict[str, object]:
        """Return the plugins that implement an observer hook, by name; observers must not change any data."""
        manager, observed = self._loader.manager, set(HOOKS.values())
        return {
            name: plugin
            for name, plugin in manager.list_name_plugin()
            if any(caller.name in observed for caller in manager.get_hookcallers(plugin) or ())
        } | self._functions

    def part(self, hook: str, **facts: object) -> object:
        """Return the part of a run that one plugin makes by a part hook; `lacking` reports a plugin that is absent."""
        made: object = getattr(self._loader.manager.hook, hook)(**facts)
        return made

    def lacking(self, hook: str, field: str, got: object) -> Iterator[ConfigError]:
        """Yield an error unless exactly one plugin implements a part hook that the configuration key `field` needs."""
        makers = getattr(self._loader.manager.hook, hook).get_hookimpls()
        if len(makers) > 1:
            names = " and ".join(sorted(maker.plugin_name for maker in makers))
            yield ConfigError(field, got, f"several plugins implement {hook}: {names}; name one of them in {DENY}")
        elif not makers:
            home = installable()["hook"][hook]
            absent = next((record for record in self._records if canonical(record.distribution) == home), None)
            unusable = absent and f"{absent.title} does not load ({absent.reason}): see `relax plugins list`"
            yield ConfigError(field, got, unusable or f"its plugin is not installed; pip install {home}")

    def observe(self, name: str, function: Callable[[Event], object]) -> None:
        """Add an observer: a function that gets every event for which there is a hook."""
        self._functions[name] = SimpleNamespace(**dict.fromkeys(HOOKS.values(), function))

    @cached_property
    def resolved(self) -> tuple[ResolvedPlugin, ...]:
        """All loaded plugins with versions; classes passed from Python are sent to workers separately."""
        return resolve(self._records)

    def verify(self, resolved: Sequence[ResolvedPlugin | Sequence[str]], shared: bool = False) -> None:
        """Raise InfrastructureError unless this process has loaded the same plugins as `resolved`.

        `shared`: compare only plugins that both lists have; an engine's interpreter may have only the engine's plugins.
        """
        compare(self.resolved, [ResolvedPlugin(*plugin) for plugin in resolved], shared)


def known_kind(name: str) -> Kind:
    """Return the kind of this name. Raises ConfigError for an unknown kind."""
    if name not in KINDS:
        raise ConfigError("kind", repr(name), did_you_mean(name, KINDS))
    return KINDS[name]


def _with_notes(records: Sequence[Record]) -> tuple[Record, ...]:
    """Add a note to the records of plugins that share a name with another plugin."""
    holders: dict[tuple[str, str], list[Record]] = defaultdict(list)
    commands = {command.name: command for record in records for command in record.commands}
    for record in records:
        holders["plugin", record.name].append(record)
        for kind, component in record.components:
            holders[kind, component.name].append(record)
        for command in record.commands:
            holders["command", command.name].append(record)
    notes: dict[int, list[str]] = defaultdict(list)
    for (kind, name), sharing in holders.items():
        for record in sharing if len(sharing) > 1 else ():
            others = ", ".join(other.title for other in sharing if other is not record)
            call = ""
            if kind == "command" and record.distribution != CORE:
                call = f"; call this one as relax {commands[name].qualified(record.distribution)}"
            notes[id(record)].append(f"{kind} {name!r} is also in {others}{call}")
    return tuple(replace(record, notes=(*record.notes, *notes[id(record)])) for record in records)


@cache
def default_tables() -> dict[str, dict[str, object]]:
    """Return the default of each configuration table of this repository's plugins, which older runs wrote out.

    `.ci/plugins.py` writes the file.
    """
    text = Path(__file__).with_name("default_tables.json").read_text(encoding="utf-8")
    return cast(dict[str, dict[str, Any]], json.loads(text))


@cache
def installable() -> dict[str, dict[str, str]]:
    """Return the distribution to install for each component, command and part hook of this repository's plugins.

    `.ci/plugins.py` writes the file, so that no error recommends a package that does not exist.
    """
    text = Path(__file__).with_name("plugins.json").read_text(encoding="utf-8")
    return cast(dict[str, dict[str, str]], json.loads(text))


def _split(kind: str, name: str) -> tuple[str, str]:
    """Return distribution and name of `distribution:name`; the distribution is empty if it is not given.

    Older run directories name the core for a component that has moved to a plugin since; its distribution is the plugin.
    """
    wanted, _, bare = name.rpartition(":")
    return (installable().get(kind, {}).get(bare, CORE) if wanted == CORE else wanted), bare


def missing(kind: Kind, name: str, records: Sequence[Record]) -> RelaxError:
    """Return the error for a component name that no loaded plugin offers, with the most certain cause."""
    wanted, bare = _split(kind.name, name)
    field = kind.table or kind.name
    if record := _would_offer(kind, wanted, bare, records):
        return _unloaded(kind, bare, record)
    if fix := _elsewhere(kind, wanted, bare, records) or _installable(kind, wanted, bare, records):
        return ConfigError(field, repr(name), fix)
    known = [component.name for record in records for of, component in record.components if of == kind.name]
    passed = kind.name == "reward" and not nearest(bare, known)
    again = "; if it is a Python function, pass it again: rewards=[...]" if passed else ""
    return ConfigError(
        field, repr(name), f"no plugin offers it; {did_you_mean(bare, known)}{again}{_failures(records)}"
    )


def unloaded(kind: str, name: str, records: Sequence[Record]) -> ConfigError | PluginError | None:
    """Return the error for a name whose plugin is broken, switched off or not installed; None for an unknown name."""
    if record := _would_offer(KINDS[kind], "", name, records):
        return _unloaded(KINDS[kind], name, record)
    fix = _installable(KINDS[kind], "", name, records)
    return ConfigError(KINDS[kind].table or kind, repr(name), fix) if fix else None


def _would_offer(kind: Kind, wanted: str, name: str, records: Sequence[Record]) -> Record | None:
    home = installable().get(kind.name, {}).get(name, "")
    for record in (record for record in records if record.state is not PluginState.OK):
        named = wanted in (record.distribution, record.name) if wanted else canonical(record.distribution) == home
        if named or (not wanted and _claims(record, kind.hook, name)):
            return record
    return None


def _claims(record: Record, hook: str, name: str) -> bool:
    """Return True if a plugin's source seems to offer a component of this name in this hook; do not run the source.

    The search does not find components that a plugin builds in a loop.
    """
    spec = find_module(record.module) if record.module else None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return False
    try:
        source = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    for function in (node for node in ast.walk(source) if isinstance(node, ast.FunctionDef) and node.name == hook):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            named = (*call.args[:1], *(k.value for k in call.keywords if k.arg == "name"))
            if any(isinstance(value, ast.Constant) and value.value == name for value in named):
                return True
    return False


def _unloaded(kind: Kind, name: str, record: Record) -> ConfigError | PluginError:
    if record.state is PluginState.SKIPPED:
        return ConfigError(
            kind.table or kind.name, repr(name), f"{record.title} offers it but was skipped: {record.reason}"
        )
    return PluginError(f"{kind.name} {name!r}", f"{record.title} offers it but failed: {record.reason}", record.frames)


def _elsewhere(kind: Kind, wanted: str, name: str, records: Sequence[Record]) -> str:
    """Return the fix for a name that exists in another distribution or as another kind; empty for an unknown name."""
    for record in records:
        for of, component in record.components:
            if component.name == name and of == kind.name and wanted:
                return f"{record.title} offers it; write {record.distribution}:{name}"
    for record in records:
        for of, component in record.components:
            if component.name == name and not wanted:
                return f"{record.title} offers it as a component of kind {of}; move it to [{KINDS[of].table or of}]"
    return ""


def _installable(kind: Kind, wanted: str, name: str, records: Sequence[Record]) -> str:
    home = installable().get(kind.name, {}).get(name, "")
    if not home or wanted not in ("", home):
        return ""
    for record in records:
        if canonical(record.distribution) == home:
            return f"{record.title} does not offer it yet; pip install --upgrade {home}"
    return f"its plugin is not installed; pip install {home}"


def _failures(records: Sequence[Record]) -> str:
    names = ", ".join(record.title for record in records if record.state is PluginState.BROKEN)
    return f" ({names} failed to load: see `relax plugins list`)" if names else ""


def missing_anywhere(name: str, records: Sequence[Record]) -> RelaxError:
    """Return the error for an unknown name of any kind, with the cause that the first matching kind gives."""
    wanted, _, bare = name.rpartition(":")
    for kind in KINDS.values():
        if record := _would_offer(kind, wanted, bare, records):
            return _unloaded(kind, bare, record)
        if fix := _installable(kind, wanted, bare, records):
            return ConfigError("NAME", repr(name), f"for kind {kind.name}: {fix}")
    known = {component.name for record in records for _, component in record.components}
    known |= {record.distribution for record in records}
    return ConfigError("NAME", repr(name), f"no plugin has this name; {did_you_mean(bare, known)}{_failures(records)}")


def _refuse_missing_package(kind: str, name: str, found: Found, error: BaseException) -> None:
    """Raise ConfigError if the error is a missing package that an extra of the component's distribution installs."""
    if extra := extra_for(found.distribution, error):
        fix = f"the component needs a package that is not installed ({said(error)}); pip install '{extra}'"
        raise ConfigError(known_kind(kind).table or kind, repr(name), fix) from error


def extra_for(distribution: str, error: BaseException) -> str:
    """Return the `distribution[extra]` whose extra installs the missing module; empty if no extra does."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    from packaging.requirements import Requirement

    wanted = canonical(error.name.partition(".")[0])
    try:
        lines = requires(distribution) or []
    except PackageNotFoundError:
        return ""  # single files and classes passed from Python have no extras
    for requirement in (Requirement(line) for line in lines):
        extra = re.search(r'extra == "([^"]+)"', str(requirement.marker or ""))
        if extra and canonical(requirement.name) == wanted:
            return f"{distribution}[{extra[1]}]"
    return ""
