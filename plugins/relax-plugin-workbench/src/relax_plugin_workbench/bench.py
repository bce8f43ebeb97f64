# SPDX-License-Identifier: Apache-2.0
"""The verbs `relax bench mismatch | engines`, which measure a configuration without training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.api.errors import ConfigError
from relax_core.cli.terminal import AsJson, Sources, print_json, print_table, run_to_end, say, split

if TYPE_CHECKING:
    from relax_plugin_workbench.mismatch import MismatchReport

verbs = typer.Typer(help="Measure properties of a configuration on this machine.", no_args_is_help=True)
COLUMNS = ("trainer", "engine", "replay", "mean", "p99", "max", "k3-KL", "ratio", "tokens")


@verbs.callback()
def bench() -> None:
    """Measure properties of a configuration on this machine."""


@verbs.command("mismatch")
def mismatch(
    arguments: Sources,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples, rounded up to whole groups.")] = 64,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Measure every pair of number formats; MoE models with and without replay."),
    ] = False,
    formats: Annotated[str, typer.Option(help="Number formats to compare, separated by commas.")] = "",
    as_json: AsJson = False,
) -> None:
    """Measure how far the log-probs of engine and trainer differ on the same tokens and weights."""
    from relax_plugin_workbench.mismatch import FORMATS, mismatch as measure

    chosen = tuple(name.strip() for name in formats.split(",") if name.strip())
    if unknown := ", ".join(name for name in chosen if name not in FORMATS):
        raise ConfigError("--formats", unknown, f"choose from {', '.join(FORMATS)}, separated by commas")
    reports = run_to_end(measure(*split(arguments), samples, chosen or (FORMATS if compare or formats else ())))
    if as_json:
        print_json({"schema": "relax.mismatch/1", "settings": [mismatch_document(report) for report in reports]})
    else:
        _print_mismatch(reports)


def mismatch_document(report: MismatchReport) -> dict[str, Any]:
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
            say(f"{report.setting.trainer} / {report.setting.engine} cannot run: {report.refused}")
    for report in reports:
        if report.rerouted is not None and not report.setting.replay:
            pair = f"{report.setting.trainer} / {report.setting.engine}"
            say(f"{pair}: the trainer routes {report.rerouted:.2%} of the tokens to other experts than the engine")
    if len(reports) == 1 and reports[0].found is not None:
        say("mean by position in the sample:")
        for end, mean in reports[0].found.positions:
            say(f"  before token {end}: {mean:.3g}")


@verbs.command("engines")
def engines(
    arguments: Sources,
    settings: Annotated[
        list[str] | None,
        typer.Option("--try", help="Overrides to measure, such as 'engine=vllm engine.max_batch_rows=64'; repeatable."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measured steps, after one to warm up.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure how fast engines sample the tasks of a configuration, and name the fastest setting.

    Without --try, measure each installed engine. A round plays the groups of one step; nothing is scored or trained.
    """
    from relax_plugin_workbench.engine_speed import engine_speeds

    speeds = run_to_end(engine_speeds(*split(arguments), settings or (), rounds))
    if as_json:
        print_json({"schema": "relax.engine-speed/1", "settings": [speed.plain() for speed in speeds]})
        return
    rows = [
        (
            speed.title, f"{speed.tokens_per_s:,.0f}",
            f"{speed.round_s:.2f} ({min(r.seconds for r in speed.rounds):.2f} to {max(r.seconds for r in speed.rounds):.2f})",
            f"{speed.start_s:.1f}", f"{speed.memory_bytes / 1e6:,.0f}" if speed.memory_bytes else "-",
            "-" if speed.prefix_hits is None else f"{speed.prefix_hits:.0%}", str(speed.failed),
        )
        for speed in speeds if not speed.refused
    ]  # fmt: skip
    print_table(("setting", "tokens/s", "s per step", "start s", "MB", "prefix hits", "failed"), rows)
    for speed in speeds:
        if speed.refused:
            say(f"{speed.title} can't run: {speed.refused}")
    best = speeds[0]
    change = f"add {best.setting} to the configuration" if best.setting else "the configuration has it already"
    say(f"fastest: {best.title} with {best.tokens_per_s:,.0f} tokens/s; {change}")
