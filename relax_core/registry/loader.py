# SPDX-License-Identifier: Apache-2.0
"""Imports plugins one at a time and asks them what they offer; a failure becomes the record's own, never the caller's.

Pluggy checks hook signatures and finds hooks that no specification knows; its bulk loader is not used, because it
drops the second distribution of one name in silence and lets one broken plugin abort all.

Installed plugins as their metadata tells them: nothing of a plugin is imported here.

One record an entry point of the group `relax.plugins`, refused ones with their reason.

Single-file plugins: `plugins = ["./my_loss.py"]`. The file's component classes are its components.

One class takes the file's name, several are named by class, both in kebab-case; or the file defines hooks, as an
installed plugin does. The configuration names the file, so what is wrong with it is raised, not recorded.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlparse

import pluggy

from relax_core.api import hooks
from relax_core.api.component import BY_HOOK, KINDS, Component, Configurable
from relax_core.api.errors import ConfigError, PluginError
from relax_core.registry.contract import is_abstract
from relax_core.registry.frames import plugin_frames, said
from relax_core.registry.handshake import api_range, refusal
from relax_core.registry.record import Offered, PluginState, Record
from relax_core.registry.suggestions import did_you_mean

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
        if record.state is not PluginState.OK:
            return record
        if record.module in self._owner:
            other = self._owner[record.module].title
            return replace(record, state=PluginState.BROKEN, reason=f"{other} has the same module {record.module}")
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
    return replace(record, state=PluginState.BROKEN, reason=said(error), frames=plugin_frames(error))


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


GROUP = "relax.plugins"


def installed(environ: Mapping[str, str]) -> Iterator[Record]:
    """Every installed plugin, ordered by distribution, not loaded yet."""
    entries = [(entry, entry.dist) for entry in entry_points(group=GROUP)]
    found = [(entry, dist, _headers(dist)) for entry, dist in entries if dist is not None]
    for entry, dist, headers in sorted(found, key=lambda item: (str(item[2]["Name"]), item[0].name)):
        yield _handshaken(entry, dist, headers, environ)


def _handshaken(entry: EntryPoint, dist: Distribution, headers: Message, environ: Mapping[str, str]) -> Record:
    record = _record(entry, dist, headers)
    try:
        record = replace(record, api_range=api_range(headers.get_all("Requires-Dist", [])))
        reason = refusal(record, environ)
    except ValueError as error:
        return replace(record, state=PluginState.BROKEN, reason=f"its metadata is damaged ({error}); install it again")
    return replace(record, state=PluginState.SKIPPED, reason=reason) if reason else record


def _headers(dist: Distribution) -> Message:
    """Only the header block: descriptions can be long, and a hundred of them are read on every start."""
    text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    return HeaderParser().parsestr(text.partition("\n\n")[0])


def _record(entry: EntryPoint, dist: Distribution, headers: Message) -> Record:
    project = _editable_project(dist)
    return Record(
        name=entry.name,
        distribution=str(headers["Name"] or entry.name),
        version=str(headers["Version"] or ""),
        module=entry.value,
        location=project or str(dist.locate_file("")),
        editable=bool(project),
    )


def _editable_project(dist: Distribution) -> str:
    """The project's directory of an editable installation, else empty."""
    try:
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
    except ValueError:
        return ""  # a damaged note on the origin says nothing, and nothing depends on it
    editable = origin.get("dir_info", {}).get("editable")
    return unquote(urlparse(origin["url"]).path) if editable else ""


def load_file(loader: Loader, path: str) -> Record:
    """Import one file. Raises ConfigError where there is none, PluginError where it fails or offers nothing."""
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError("plugins", repr(path), "name an existing .py file")
    record = _single_file_record(file)
    try:
        module = _import(record.module, file)
        loaded = loader.adopt(record, module)
    except (Exception, SystemExit) as error:
        message = f"the plugin can't be loaded: {said(error)}; correct the file, or take it out of `plugins`"
        raise PluginError(str(file), message, plugin_frames(error)) from error
    loaded = replace(loaded, components=loaded.components + tuple(_classes(module, file, loaded)))
    if not loaded.components and not loaded.hooks:
        raise PluginError(
            str(file), "it defines neither a component class nor a hook; subclass a base of relax_core.api"
        )
    return loaded


def _single_file_record(file: Path) -> Record:
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    module = f"relax_file_{re.sub(r'[^A-Za-z0-9]+', '_', file.stem)}_{digest}"
    return Record(file.name, file.name, "", module, str(file), file=True)


def _import(name: str, file: Path) -> ModuleType:
    """Import under a name of its own; registered first, because dataclasses and pydantic look their module up."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _classes(module: ModuleType, file: Path, loaded: Record) -> Iterator[Offered]:
    """The file's own concrete component classes that none of its hooks offers already."""
    hooked = {component.target.rpartition(":")[2] for _, component in loaded.components}
    classes = [value for name, value in vars(module).items() if name not in hooked and _is_component(value, module)]
    for value in classes:
        name = kebab(file.stem if len(classes) == 1 else value.__name__)
        help_line = (value.__doc__ or "").strip().partition("\n")[0]
        yield Offered(value.kind, Component(name, f"{module.__name__}:{value.__name__}", help_line))


def _is_component(value: object, module: ModuleType) -> bool:
    if not isinstance(value, type) or not issubclass(value, Configurable):
        return False
    own = value.__module__ == module.__name__ and not value.__name__.startswith("_")
    return own and value.kind in KINDS and not is_abstract(value)


def kebab(name: str) -> str:
    """`MyReward`, `my_reward` and `HTTPReward` as `my-reward`, `my-reward`, `http-reward`."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name)
    return re.sub(r"[^a-z0-9]+", "-", split.lower()).strip("-")
