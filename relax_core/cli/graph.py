# SPDX-License-Identifier: Apache-2.0
"""`relax graph`: the operations that a configuration needs, in order, as text, Mermaid or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from relax_core.api.errors import ConfigError


def add(app: typer.Typer) -> None:
    app.command("graph")(graph)


def graph(
    arguments: Annotated[list[str], typer.Argument(help="TOML files or a recipe, then overrides.")],
    form: Annotated[str, typer.Option("--format", help="text, mermaid or json")] = "text",
) -> None:
    """Draw the graph of operations."""
    from relax_core.cli.train import split

    if form not in ("text", "mermaid", "json"):
        raise ConfigError("--format", repr(form), "choose text, mermaid or json")
    show(*split(arguments), form)  # type: ignore[arg-type]


def show(sources: Sequence[str], overrides: Sequence[str], form: Literal["text", "mermaid", "json"] = "text") -> None:
    """Print the plan of a configuration that may not have its files yet."""
    from relax_core.control.graph import draw, mermaid
    from relax_core.control.prepare import plan_of

    plan = plan_of(sources, overrides)
    if form == "text":
        print("\n".join((draw(plan.operations), *(f"note: {note}" for note in plan.notes))))
    elif form == "mermaid":
        print(mermaid(plan.operations))
    else:
        print(json.dumps([_plain(operation) for operation in plan.operations]))


def _plain(operation: object) -> dict[str, object]:
    from dataclasses import asdict

    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(operation).items()}  # type: ignore[call-overload]
