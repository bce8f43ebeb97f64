# SPDX-License-Identifier: Apache-2.0
"""`relax try | bench`: generate and measure with a configuration, without a run. Nothing is trained or kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.api.errors import ConfigError
from relax_core.cli.terminal import AsJson, Sources, print_json, print_table, split

if TYPE_CHECKING:
    from relax_core.diagnostics.mismatch import MismatchReport

verbs = typer.Typer(help="Measure what a configuration does here.", no_args_is_help=True)
COLUMNS = ("trainer", "engine", "replay", "mean", "p99", "max", "k3-KL", "ratio", "tokens")


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
    from relax_core.diagnostics.trial import reward_trial, trial

    if arguments[0] == "reward":
        reward, *options = arguments[1:] or [""]
        if not reward or data is None:
            raise ConfigError("relax try reward", " ".join(arguments[1:]) or "nothing", "give NAME and --data FILE")
        plugins = [str(path) for path in plugin or ()]
        records: Sequence[dict[str, Any]] = asyncio.run(reward_trial(reward, options, data, plugins))
    else:
        records = asyncio.run(trial(*split(arguments), tasks))
    print(json.dumps(records) if as_json else "\n\n".join(_record_text(record) for record in records))


def _record_text(record: dict[str, Any]) -> str:
    reward = "no reward" if record["reward"] is None else f"reward {record['reward']:g}"
    named = [(name, record.get(name)) for name in ("prompt", "response", "answer", "error")]
    lines = [f"  {name}: {value}" for name, value in named if value is not None]
    return "\n".join([f"task {record['task_id']}  {reward}  {record['outcome']}", *lines])


@verbs.callback()
def bench() -> None:
    """Measure what a configuration does here."""


@verbs.command("mismatch")
def mismatch(
    arguments: Sources,
    samples: Annotated[int, typer.Option(min=1, help="How many samples, rounded up to whole groups.")] = 64,
    compare: Annotated[
        bool, typer.Option("--compare", help="Every pair of number formats; of experts, with and without replay.")
    ] = False,
    formats: Annotated[str, typer.Option(help="Of --compare: which formats, with commas between.")] = "",
    as_json: AsJson = False,
) -> None:
    """How far its engine's log-probs are from its trainer's, on the same tokens and weights: |difference|, and KL."""
    from relax_core.diagnostics.mismatch import FORMATS, mismatch as measure

    chosen = tuple(name.strip() for name in formats.split(",") if name.strip())
    for name in chosen:
        if name not in FORMATS:
            raise ConfigError("--formats", name, f"write some of {', '.join(FORMATS)}, with commas between")
    reports = asyncio.run(measure(*split(arguments), samples, chosen or (FORMATS if compare or formats else ())))
    if as_json:
        print_json({"schema": "relax.mismatch/1", "settings": [mismatch_document(report) for report in reports]})
    else:
        _print_mismatch(reports)


def mismatch_document(report: MismatchReport) -> dict[str, Any]:
    """Give one setting's report as `--json` prints it."""
    setting = {"trainer": report.setting.trainer, "engine": report.setting.engine, "replay": report.setting.replay}
    if report.found is None:
        return {**setting, "refused": report.refused}
    return {**setting, **report.found.plain(), **({} if report.rerouted is None else {"rerouted": report.rerouted})}


def _print_mismatch(reports: list[MismatchReport]) -> None:
    rows = []
    for report in reports:
        setting, found = report.setting, report.found
        if found is not None:
            rows.append({
                "trainer": setting.trainer, "engine": setting.engine, "replay": "yes" if setting.replay else "no",
                "mean": f"{found.mean:.3g}", "p99": f"{found.p99:.3g}", "max": f"{found.max:.3g}",
                "k3-KL": f"{found.k3_kl:.3g}", "ratio": f"{found.ratio_min:.4g} to {found.ratio_max:.4g}",
                "tokens": str(found.tokens),
            })  # fmt: skip
    replays = any(report.setting.replay for report in reports)
    shown = tuple(name for name in COLUMNS if name != "replay" or replays)
    print_table(shown, [tuple(row[name] for name in shown) for row in rows])
    for report in reports:
        if report.found is None:
            typer.echo(f"{report.setting.trainer} / {report.setting.engine} can't run: {report.refused}")
    for report in reports:
        if report.rerouted is not None and not report.setting.replay:
            pair = f"{report.setting.trainer} / {report.setting.engine}"
            typer.echo(f"{pair}: {report.rerouted:.2%} of the tokens visit other experts")
    if len(reports) == 1 and reports[0].found is not None:
        typer.echo("mean by place in the sample:")
        for end, mean in reports[0].found.positions:
            typer.echo(f"  before token {end}: {mean:.3g}")
