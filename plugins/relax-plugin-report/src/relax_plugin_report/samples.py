# SPDX-License-Identifier: Apache-2.0
"""The verb `relax samples`: what a run's policy wrote at a step."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Annotated

import typer

from relax_core.cli.terminal import AsJson, Run, print_json, say

if TYPE_CHECKING:
    from relax_core.runs import RunView

POLL_S = 0.2
"""Seconds between two looks at a live run."""


def samples(
    run: Run = None,
    step: Annotated[
        int | None, typer.Option(help="Step of the samples; default: the newest trained step.", min=0)
    ] = None,
    limit: Annotated[int, typer.Option(help="Most samples to show; 0: all.", min=0)] = 8,
    best: Annotated[bool, typer.Option("--best", help="Show the samples with the highest rewards.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Show the samples with the lowest rewards.")] = False,
    evaluation: Annotated[
        bool, typer.Option("--eval", help="Show samples of evaluations instead of training.")
    ] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Show texts without leaving out the middle.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show each further step until the run ends.")] = False,
    json: AsJson = False,
) -> None:
    """Show samples of a step as a table: reward, tokens, prompt and response.

    Of a sample without a reward, the outcome is shown. The page of `relax report` shows more of each sample.
    """
    from relax_core.api.errors import ConfigError
    from relax_core.runs import health, open_run, readable
    from relax_plugin_report.sample_table import chosen, sample_table

    if best and worst:
        raise ConfigError("--best", "--worst as well", "give one of them")
    if follow and step is not None:
        raise ConfigError("--follow", "--step as well", "give one of them")
    view = open_run(run)

    def show(at: int) -> bool:
        with readable(view.path):
            found = chosen(view.samples(at), best, worst, evaluation)
        shown = found[: limit or None]
        if shown and json:
            print_json({"schema": "relax.samples/1", "run": view.name, "step": at, "samples": shown})
        elif shown:
            say(f"{view.name}: step {at}, {len(shown)} of {len(found)} samples\n")
            say(sample_table(shown, shutil.get_terminal_size((120, 24)).columns, whole) + "\n")
        return bool(shown)

    steps = _trained(view) if step is None else [step]
    last = next((at for at in reversed(steps) if show(at)), None)
    if last is None and not follow:
        kind = "of an evaluation " if evaluation else ""
        raise ConfigError("--step", "the newest" if step is None else str(step), _fix(view, kind))
    while follow:
        ended = health(view, time.time())
        for at in _trained(view):
            if last is None or at > last:
                last = at if show(at) or not evaluation else last
        if ended.ended or ended.state == "lost":
            return
        time.sleep(POLL_S)


def _trained(view: RunView) -> list[int]:
    """Return the steps whose samples are complete, since the step is trained."""
    done = int(view.status().get("step", 0))
    return [at for at in view.sample_steps() if at <= done]


def _fix(view: RunView, kind: str) -> str:
    kept = view.sample_steps()
    having = f"the run has samples of steps {kept[0]} to {kept[-1]}" if kept else "the run has no samples yet"
    return f"no sample {kind}was found; {having}"
