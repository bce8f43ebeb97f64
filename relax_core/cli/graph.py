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
    from relax_core.control.planner import draw, mermaid
    from relax_core.control.prepare import plans_of

    plans = plans_of(sources, overrides)
    if form == "json":
        drawn = {name: [_plain(operation) for operation in plan.operations] for name, plan in plans}
        print(json.dumps(drawn if len(drawn) > 1 else next(iter(drawn.values()))))
        return
    for name, plan in plans:
        if name:
            print(f"{'stage ' if form == 'text' else '%% stage '}{name}")
        print(draw(plan.operations) if form == "text" else mermaid(plan.operations))
        for note in plan.notes if form == "text" else ():
            print(f"note: {note}")


def _plain(operation: object) -> dict[str, object]:
    from dataclasses import asdict

    return {k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(operation).items()}  # type: ignore[call-overload]
