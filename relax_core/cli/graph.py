# SPDX-License-Identifier: Apache-2.0
"""The verb `relax graph`, and the output of `--dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from relax_core.api.errors import ConfigError
from relax_core.cli.terminal import Sources, say, split


def graph(
    arguments: Sources, form: Annotated[str, typer.Option("--format", help="Output: text, mermaid or json.")] = "text"
) -> None:
    """Draw the graph of a configuration's operations."""
    from relax_core.control.dry_run import graph_lines
    from relax_core.control.prepare import plan_run

    if form not in ("text", "mermaid", "json"):
        raise ConfigError("--format", repr(form), "choose text, mermaid or json")
    planned = plan_run(*split(arguments))
    for notice in planned.composed.notices:
        say(notice, err=True)
    for line in graph_lines(planned, form):
        say(line)


def dry_run(sources: Sequence[str], overrides: Sequence[str]) -> None:
    """Make every check of a configuration, start nothing, and print the graph, tools and data if nothing is wrong."""
    from relax_core.control.dry_run import check_all, check_imports
    from relax_core.control.prepare import plan_run

    planned = plan_run(sources, overrides)
    lines = check_all(planned)
    say("relax: importing the engine and the trainer, each in its own interpreter", err=True)
    check_imports(planned)
    for line in lines:
        say(line)
