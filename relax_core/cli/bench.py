# SPDX-License-Identifier: Apache-2.0
"""`relax bench`: measure what a configuration will do on this machine, without a run. Nothing is trained or kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from relax_core.diagnostics.mismatch import Differences, MismatchReport, Setting

Arguments = Annotated[list[str], typer.Argument(help="TOML files or a recipe, then overrides.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Samples = Annotated[int, typer.Option(min=1, help="How many samples, rounded up to whole groups.")]
Compare = Annotated[
    bool, typer.Option("--compare", help="Every pair of number formats; of experts, with and without replay.")
]
Formats = Annotated[str, typer.Option(help="Of --compare: which formats, with commas between.")]
HEAD = ("trainer", "engine", "replay", "mean", "p99", "max", "k3-KL", "ratio", "tokens")


def add(app: typer.Typer) -> None:
    """Hang the verbs on the command line."""
    verbs = typer.Typer(help="Measure what a configuration does here.", no_args_is_help=True)
    verbs.callback()(_several)
    verbs.command("mismatch")(mismatch)
    app.add_typer(verbs, name="bench")


def _several() -> None:
    """Measure what a configuration does here."""


def mismatch(
    arguments: Arguments,
    samples: Samples = 64,
    compare: Compare = False,
    formats: Formats = "",
    as_json: AsJson = False,
) -> None:
    """How far its engine's log-probs are from its trainer's, on the same tokens and weights: |difference|, and KL."""
    import asyncio

    from relax_core.cli.runs import print_json
    from relax_core.cli.train import split
    from relax_core.diagnostics import mismatch as bench

    chosen = _formats(formats, bench.FORMATS) if compare or formats else ()
    found = asyncio.run(bench.mismatch(*split(arguments), samples, chosen))
    if as_json:
        print_json({"schema": "relax.mismatch/1", "settings": [document(one) for one in found]})
    else:
        _print(found)


def _formats(asked: str, known: tuple[str, ...]) -> tuple[str, ...]:
    from relax_core.api.errors import ConfigError

    names = tuple(name.strip() for name in asked.split(",") if name.strip()) or known
    for name in names:
        if name not in known:
            raise ConfigError("--formats", name, f"write some of {', '.join(known)}, with commas between")
    return names


def document(one: MismatchReport) -> dict[str, Any]:
    """As `--json` gives it."""
    setting = {"trainer": one.setting.trainer, "engine": one.setting.engine, "replay": one.setting.replay}
    return (
        {**setting, "refused": one.refused}
        if one.found is None
        else {**setting, **one.found.plain(), **({} if one.rerouted is None else {"rerouted": one.rerouted})}
    )


def _print(found: list[MismatchReport]) -> None:
    from relax_core.cli.runs import print_table

    replays = any(one.setting.replay for one in found)
    shown = [name for name in HEAD if name != "replay" or replays]
    rows = [_row(one.setting, one.found) for one in found if one.found is not None]
    print_table(tuple(shown), [tuple(row[name] for name in shown) for row in rows])
    for one in found:
        if one.found is None:
            typer.echo(f"{one.setting.trainer} / {one.setting.engine} can't run: {one.refused}")
    for one in found:
        if one.rerouted is not None and not one.setting.replay:
            typer.echo(
                f"{one.setting.trainer} / {one.setting.engine}: {one.rerouted:.2%} of the tokens visit other experts"
            )
    if len(found) == 1 and found[0].found is not None:
        typer.echo("mean by place in the sample:")
        for end, mean in found[0].found.positions:
            typer.echo(f"  before token {end}: {mean:.3g}")


def _row(setting: Setting, own: Differences) -> dict[str, str]:
    return {
        "trainer": setting.trainer, "engine": setting.engine, "replay": "yes" if setting.replay else "no",
        "mean": f"{own.mean:.3g}", "p99": f"{own.p99:.3g}", "max": f"{own.max:.3g}", "k3-KL": f"{own.k3_kl:.3g}",
        "ratio": f"{own.ratio_min:.4g} to {own.ratio_max:.4g}", "tokens": str(own.tokens),
    }  # fmt: skip
