# SPDX-License-Identifier: Apache-2.0
"""New plugin projects from templates; `bake` writes a project that can be installed and passes its tests unchanged.

The code of a working single-file plugin can be moved into the new project without changes.
"""

from __future__ import annotations

import ast
from pathlib import Path

from cookiecutter.generate import generate_context, generate_files
from cookiecutter.prompt import prompt_for_config
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from relax_core.api import KINDS, ConfigError
from relax_core.api.command import KEBAB
from relax_core.launch import Catalogue, core_range, known_kind

PREFIX = "relax-plugin-"
COMMAND = "command"
LICENSE = "Apache-2.0"
"""SPDX expression of a new project's license, unless its author chooses another."""


def bake(kind: str, name: str, out: Path, source: Path | None = None, spdx: str = LICENSE) -> Path:
    """Write a new project into `out`. Raises ConfigError for a name, file, directory or license that cannot be used.

    `kind`: a kind of component, or `command`.

    `spdx`: the license as an SPDX expression, such as `MIT OR Apache-2.0` or `LicenseRef-Proprietary`.
    """
    template, module = template_of(kind), kind.replace("-", "_")
    name = name.removeprefix(PREFIX)
    if not KEBAB.fullmatch(name) or not name[0].isalpha():
        raise ConfigError("NAME", repr(name), "write a name in kebab-case, such as my-reward")
    project = out / f"{PREFIX}{name}"
    if project.exists():
        raise ConfigError("--out", str(project), "this folder exists; choose another name or directory")
    try:
        spdx = canonicalize_license_expression(spdx)
    except InvalidLicenseExpression as error:
        fix = "write an SPDX expression, such as Apache-2.0, MIT or LicenseRef-Proprietary"
        raise ConfigError("--license", f"{spdx!r} ({error})", fix) from error
    context = {"license": spdx, "kind": kind, "name": name, "core_range": core_range()}
    if kind != COMMAND:
        context["hook"] = KINDS[kind].hook
    elif source is not None:
        raise ConfigError("--from", str(source), "only components move from one file; copy the function of a command")
    if source is not None:
        context |= _moved(kind, source)
    out.mkdir(parents=True, exist_ok=True)
    # The command `cookiecutter` would also read files in the user's home.
    raw = generate_context(str(template / "cookiecutter.json"), extra_context=context)
    chosen = prompt_for_config(raw, no_input=True)
    generate_files(str(template), {"cookiecutter": chosen}, output_dir=str(out), accept_hooks=False)
    if source is not None:
        (project / "src" / project.name.replace("-", "_") / f"{module}.py").write_bytes(source.read_bytes())
    return project


def template_of(kind: str) -> Path:
    """Return the folder of the template: package data in a wheel, beside `src` in the source tree.

    All kinds share the project `templates/plugin`, which includes the files of `templates/plugin/templates/KIND`. Raises
    ConfigError for a kind that does not exist.
    """
    if kind != COMMAND:
        known_kind(kind)
    package = Path(__file__).parent
    places = [root / "templates" / "plugin" for root in (package, package.parents[1])]
    return next((place for place in places if place.is_dir()), places[0])


def _moved(kind: str, source: Path) -> dict[str, str]:
    """Return the template's variables for a single-file plugin, which must hold exactly one class of this kind."""
    record = next(record for record in Catalogue.load([str(source)]).records if record.file)
    own = [offered for offered in record.components if offered.kind == kind]
    if len(own) != 1 or len(record.components) != 1 or record.hooks:
        found = ", ".join(f"{k} {component.name}" for k, component in record.components) or "no component"
        raise ConfigError("--from", f"{source} with {found}", f"use a file with one {kind} class and without hooks")
    component = own[0].component
    said = component.help or (ast.get_docstring(ast.parse(source.read_bytes())) or "").partition("\n")[0]
    # The text becomes part of TOML and Python strings, so it must be one line without quotes.
    text = (said or f"{component.name}, moved from one file").replace('"', "'").replace("\\", "/")
    return {"class_name": component.target.rpartition(":")[2], "help": text.rstrip("."), "moved": "yes"}
