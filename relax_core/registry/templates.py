# SPDX-License-Identifier: Apache-2.0
"""Projects from templates: `bake` writes one that builds, installs, is found and conforms as it stands.

A working single-file plugin can be moved into it: its code is taken over unchanged.
"""

from __future__ import annotations

import ast
from pathlib import Path

import relax_core
from relax_core.api.component import KINDS
from relax_core.api.errors import ConfigError
from relax_core.registry.catalogue import Catalogue, known_kind
from relax_core.registry.handshake import core_range
from relax_core.registry.loader import KEBAB

PREFIX = "relax-plugin-"


def bake(kind: str, name: str, out: Path, source: Path | None = None) -> Path:
    """Write a new project into `out`. Raises ConfigError for a name, file or directory that can't be used."""
    template = template_of(kind)
    name = name.removeprefix(PREFIX)
    if not KEBAB.fullmatch(name) or not name[0].isalpha():
        raise ConfigError("NAME", repr(name), "write it in kebab-case, such as my-reward")
    project = out / f"{PREFIX}{name}"
    if project.exists():
        raise ConfigError("--out", str(project), "it exists; choose another name or directory")
    context = {"name": name, "core_range": core_range()}
    if source is not None:
        context |= _moved(kind, source)
    out.mkdir(parents=True, exist_ok=True)
    _generate(template, context, out)
    if source is not None:
        (project / "src" / project.name.replace("-", "_") / f"{kind}.py").write_bytes(source.read_bytes())
    return project


def template_of(kind: str) -> Path:
    """Find the kind's template: package data in a wheel, a directory beside the package in the source tree."""
    found = known_kind(kind)
    if not found.template:
        having = ", ".join(k.name for k in KINDS.values() if k.template)
        raise ConfigError("KIND", repr(kind), f"it has no template; there is one for {having}")
    package = Path(relax_core.__file__).parent
    places = [root / "templates" / found.template for root in (package, package.parent)]
    return next((place for place in places if place.is_dir()), places[0])


def _generate(template: Path, context: dict[str, str], out: Path) -> None:
    """Through cookiecutter's own functions: its command would read and write files in the user's home."""
    from cookiecutter.generate import generate_context, generate_files
    from cookiecutter.prompt import prompt_for_config

    raw = generate_context(str(template / "cookiecutter.json"), extra_context=context)
    chosen = prompt_for_config(raw, no_input=True)
    generate_files(str(template), {"cookiecutter": chosen}, output_dir=str(out), accept_hooks=False)


def _moved(kind: str, source: Path) -> dict[str, str]:
    """Read what the template needs to know of a single-file plugin: its one class of this kind."""
    record = next(record for record in Catalogue.load([str(source)]).records if record.file)
    own = [offered for offered in record.components if offered.kind == kind]
    if len(own) != 1 or len(record.components) != 1 or record.hooks:
        found = ", ".join(f"{k} {component.name}" for k, component in record.components) or "no component"
        raise ConfigError("--from", f"{source} with {found}", f"give a file of one {kind} class and without hooks")
    component = own[0].component
    said = component.help or (ast.get_docstring(ast.parse(source.read_bytes())) or "").partition("\n")[0]
    # One line without quotes: it goes into TOML and Python strings.
    text = (said or f"{component.name}, moved from one file").replace('"', "'").replace("\\", "/")
    return {"class_name": component.target.rpartition(":")[2], "help": text.rstrip("."), "moved": "yes"}
