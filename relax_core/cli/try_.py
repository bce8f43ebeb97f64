# SPDX-License-Identifier: Apache-2.0
"""`relax try`: see what a configuration generates and what its rewards say, without training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_core.api.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def add(app: typer.Typer) -> None:
    app.command("try")(try_)


def try_(
    arguments: Annotated[list[str], typer.Argument(help="TOML files and overrides; or: reward NAME.")],
    tasks: Annotated[int, typer.Option(help="How many tasks to generate for.")] = 4,
    data: Annotated[
        Path | None, typer.Option(help="For a reward: JSON lines with `response`, or failing-sample.json.")
    ] = None,
    plugin: Annotated[list[Path] | None, typer.Option(help="For a reward: a single-file plugin.")] = None,
    as_json: AsJson = False,
) -> None:
    """A few rollouts scored and printed; `relax try reward NAME --data FILE` scores alone."""
    if arguments[0] == "reward":
        records = _reward(arguments[1:], data, [str(path) for path in plugin or ()])
    else:
        records = _rollouts(arguments, tasks)
    print(json.dumps(records) if as_json else "\n\n".join(_shown(record) for record in records))


def _rollouts(arguments: list[str], tasks: int) -> Sequence[dict[str, Any]]:
    from relax_core.cli.train import split
    from relax_core.diagnostics.trial import trial

    return asyncio.run(trial(*split(arguments), tasks))


def _reward(arguments: list[str], data: Path | None, plugins: list[str]) -> Sequence[dict[str, Any]]:
    from relax_core.diagnostics.trial import reward_trial

    if len(arguments) < 1 or data is None:
        raise ConfigError("relax try reward", " ".join(arguments) or "nothing", "give NAME and --data FILE")
    return asyncio.run(reward_trial(arguments[0], arguments[1:], data, plugins))


def _shown(record: dict[str, Any]) -> str:
    reward = "no reward" if record["reward"] is None else f"reward {record['reward']:g}"
    lines = [f"task {record['task_id']}  {reward}  {record['outcome']}"]
    lines += [
        f"  {name}: {record[name]}"
        for name in ("prompt", "response", "answer", "error")
        if record.get(name) is not None
    ]
    return "\n".join(lines)
