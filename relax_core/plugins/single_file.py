# SPDX-License-Identifier: Apache-2.0
"""Single-file plugins: `plugins = ["./my_loss.py"]`. The file's component classes are its components.

One class takes the file's name, several are named by class, both in kebab-case; or the file defines hooks, as an
installed plugin does. The configuration names the file, so what is wrong with it is raised, not recorded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from relax_core.api.component import Component, Configurable
from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.kinds import KINDS
from relax_core.plugins.contract import is_abstract
from relax_core.plugins.frames import plugin_frames, said
from relax_core.plugins.loader import Loader
from relax_core.plugins.record import Offered, Record


def load_file(loader: Loader, path: str) -> Record:
    """Import one file. Raises ConfigError where there is none, PluginError where it fails or offers nothing."""
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError("plugins", repr(path), "name an existing .py file")
    record = _record(file)
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


def _record(file: Path) -> Record:
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
