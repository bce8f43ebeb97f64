# SPDX-License-Identifier: Apache-2.0
"""`relax new KIND NAME`: a plugin project that installs, is found and conforms as it stands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def add(app: typer.Typer) -> None:
    """Add the verb to `relax`."""
    app.command("new")(new)


def new(
    kind: Annotated[str, typer.Argument(help="reward, environment or algorithm.")],
    name: Annotated[str, typer.Argument(help="The component's name, in kebab-case.")],
    source: Annotated[Path | None, typer.Option("--from", help="A working single-file plugin to move into it.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Where the project's directory is made.")] = Path(),
) -> None:
    """Write a plugin project: code, tests with the conformance suite, packaging."""
    from relax_core.registry.templates import bake

    project = bake(kind, name, out, source)
    print(project)
    print(f"next: pip install -e '{project}[test]' && relax plugins check {project.name}", file=sys.stderr)
