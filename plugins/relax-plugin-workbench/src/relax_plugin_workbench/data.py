# SPDX-License-Identifier: Apache-2.0
"""The verbs `relax data check | show`: bad rows of task files, and rendered prompts. Task files are not changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.api.errors import ConfigError
from relax_core.cli.terminal import AsJson, run_to_end, say

if TYPE_CHECKING:
    from relax_core.data.overlap import Overlap
    from relax_core.rewards.golds import GoldReport
    from relax_plugin_workbench.data_survey import DataFile, Survey

SHOWN_BAD_ROWS = 50
FIRST_ROWS = 2
"""Number of rows whose rendered prompt `check` shows."""
PROVED_ROWS = 100
"""Number of first rows of which `check` proves that their tokens have the words of the row."""
SHOWN_CHARS = 600
SEPARATOR = "│"

File = Annotated[
    Path, typer.Argument(metavar="FILE|TOML", help="A task file, or a configuration that names task files.")
]
Model = Annotated[Path | None, typer.Option(help="Model folder with the chat template and tokenizer.")]


verbs = typer.Typer(help="Check task files and show prompts.", no_args_is_help=True)


@verbs.command("check")
def check(
    file: File,
    model: Model = None,
    media: Annotated[bool, typer.Option("--media", help="Also decode all images, videos and sounds.")] = False,
    reward: Annotated[
        str, typer.Option(help="A reward that reads the answers of a task file; a TOML file names its rewards.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List every unusable row with the reason, and count the usable rows.

    Also count the rows that repeat an earlier row, and the tasks of evaluation sets that are in the training file. With a
    model, also show the rendered prompt and the trained text of the first rows. The exit code is 2 if a row is unusable.
    """
    from relax_plugin_workbench.data_survey import data_files, survey, survey_faults, survey_overlap

    reports, trained = [], None
    for opened in data_files(file, model, reward):
        result = survey(opened, media)
        survey_overlap(opened, result, trained)
        if opened.evaluated is None:
            trained = opened, result
        first = _first(opened, sorted(result.rows)[:FIRST_ROWS])
        survey_faults(opened, result, sorted(result.rows)[:PROVED_ROWS])
        reports.append({**_report(result), "first": first})
    if as_json:
        say(json.dumps({"schema": 1, "files": reports}, ensure_ascii=False))
    else:
        for report in reports:
            _print_report(report)
    if any(report["bad"] for report in reports):
        raise typer.Exit(2)


@verbs.command("show")
def show(
    file: File,
    model: Model = None,
    index: Annotated[int, typer.Option(help="Index of the task among the usable tasks, from 0.")] = 0,
    html: Annotated[
        Path | None, typer.Option(help="Also write an HTML page with the task's media to this path.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show one rendered prompt, token by token.

    Then print its token ids, the task's answer and remaining columns, and facts about the task's media.
    """
    from relax_core.runs import write_text
    from relax_plugin_workbench.data_survey import data_files
    from relax_plugin_workbench.task_page import task_page

    shown = _shown(next(iter(data_files(file, model))), index)
    previews = [one.pop("preview", None) for one in shown["media"]]
    if html is not None:
        write_text(html, task_page(shown, previews))
        say(str(html), err=True)
    if as_json:
        say(json.dumps({"schema": 1, **shown}, ensure_ascii=False))
    else:
        _print_shown(shown)


def _report(result: Survey) -> dict[str, Any]:
    return {
        "path": result.path,
        "usable": result.usable,
        "skipped": result.skipped,
        "bad": [{"where": row.where, "reason": row.reason, "field": row.field, "fix": row.fix} for row in result.bad],
        "remarks": list(result.remarks),
        "warnings": list(result.warnings),
        "columns": dict(result.columns),
        "overlap": _overlap(result.overlap),
        "golds": _golds(result.golds),
        "media": result.media,
        "tokens": _spread(result.lengths),
    }


def _overlap(overlap: Overlap | None) -> dict[str, Any]:
    """Return the rows that repeat each other as JSON data: of a training file, or of an evaluation set in that file."""
    if overlap is None:
        return {}
    if not overlap.sets:
        return {"repeated": [pair._asdict() for pair in overlap.repeated], "summary": [overlap.said()]}
    (in_training,) = overlap.sets.values()
    shared = {name: [pair._asdict() for pair in getattr(in_training, name)] for name in ("equal", "similar")}
    return {**shared, "summary": [in_training.said(name) for name in shared]}


def _golds(report: GoldReport | None) -> dict[str, Any]:
    """Return the check of the gold answers as JSON data; empty if no reward reads gold answers."""
    if report is None:
        return {}
    shown = [
        {
            "where": where,
            "reward": reward,
            "read": gold.read,
            "scores": dict(zip(gold.responses, gold.scores, strict=True)),
        }
        for where, reward, gold in report.read
    ]
    return {
        "total": report.total,
        "checked": report.checked,
        "bad": len(report.bad),
        "summary": str(report),
        "read": shown,
    }


def _spread(lengths: list[int]) -> dict[str, int]:
    """Return percentiles of prompt lengths; empty if no model was given."""
    if not lengths:
        return {}
    ordered = sorted(lengths)
    at = {name: ordered[int((len(ordered) - 1) * share)] for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return {"min": ordered[0], **at, "max": ordered[-1]}


def _print_report(report: dict[str, Any]) -> None:
    for row in report["bad"][:SHOWN_BAD_ROWS]:
        fix = f"; {row['fix']}" if row["fix"] and row["fix"] not in row["reason"] else ""
        say(f"{row['where']}: {row['reason']}{fix}")
    if len(report["bad"]) > SHOWN_BAD_ROWS:
        say(f"... and {len(report['bad']) - SHOWN_BAD_ROWS} more bad rows; --json lists all")
    skipped = f", {report['skipped']} skipped as too long" if report["skipped"] else ""
    say(f"{report['path']}: {report['usable']} usable, {len(report['bad'])} bad{skipped}")
    for text in report["remarks"]:
        say(f"values   {text}")
    for text in report["overlap"].get("summary", ()):
        say(f"overlap  {text}")
    for text in report["warnings"]:
        say(f"warning  {text}")
    if report["golds"]:
        say("golds    " + report["golds"]["summary"])
    for gold in report["golds"].get("read", ()):
        scores = ", ".join(f"{score:g} for {response!r}" for response, score in gold["scores"].items())
        say(f"  {gold['where']}: {gold['reward']} reads {gold['read']}" + (f"; it scores {scores}" if scores else ""))
    if report["columns"]:
        say("columns  " + ", ".join(f"{name} {count}" for name, count in report["columns"].items()))
    for kind, sums in report["media"].items():
        seconds = f", {sums['seconds']:.1f} s" if sums["seconds"] else ""
        say(
            f"{kind:<9}{sums['count']:.0f} decoded, {sums['tokens']:.0f} tokens, {sums['size_bytes'] / 1e6:.1f} MB{seconds}"
        )
    if report["tokens"]:
        say("tokens   " + ", ".join(f"{name} {count}" for name, count in report["tokens"].items()))
    for shown in report["first"]:
        say(f"{shown['where']}\n  prompt   {_cut(shown['prompt'])}")
        for text in shown["trained"]:
            say(f"  trained  {_cut(text)}")


def _shown(file: DataFile, index: int) -> dict[str, Any]:
    from relax_core.data.tasks import TaskSet
    from relax_plugin_workbench.data_survey import facts, shown_by

    tasks, family = file.tasks, file.family
    if tasks is None or family is None:
        raise ConfigError(
            "--model", "no model folder", "give the folder whose chat template and tokenizer render the prompt"
        )
    if file.refused:
        raise file.refused
    if not 0 <= index < len(tasks):
        raise ConfigError("--index", index, f"choose 0 to {len(tasks) - 1}")
    task, ids = tasks[index], tasks.prompt(index).tokens
    media = run_to_end(facts(file, task)) if any(shown_by(task)) else []
    written = () if isinstance(tasks, TaskSet) else tasks.examples(index)
    return {
        "where": tasks.where(index),
        "id": task.id,
        **({"trained": ["".join(_trained(family, one)) for one in written]} if written else {}),
        "tokens": [family.decode((number,), skip_special=False) for number in ids],
        "ids": list(ids),
        "answer": task.answer,
        "metadata": dict(task.metadata),
        "media": media,
        "ends_with": [family.decode((number,), skip_special=False) for number in family.stop_tokens],
    }


def _first(file: DataFile, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rendered prompt of rows and the text that is trained; none without a model."""
    from relax_core.data.dataset import Dataset

    tasks, family = file.tasks, file.family
    if tasks is None or family is None:
        return []
    shown = []
    for row in rows:
        written = tasks.examples(row) if isinstance(tasks, Dataset) else ()
        tokens = tasks.prompt(row).tokens
        given = next((index for index, mask in enumerate(written[0].mask) if mask), 0) if written else len(tokens)
        prompt = family.decode(tokens[:given], skip_special=False)
        trained = ["".join(_trained(family, example)) for example in written]
        shown.append({"where": tasks.where(row), "prompt": prompt, "trained": trained})
    return shown


def _cut(text: str) -> str:
    """Return a text in one line, without its middle if it is long."""
    line = text.replace("\n", "⏎")
    return line if len(line) <= SHOWN_CHARS else f"{line[: SHOWN_CHARS // 2]} ... {line[-SHOWN_CHARS // 2 :]}"


def _trained(family: Any, written: Any) -> Iterator[str]:
    """Yield the text of each sequence of trained tokens."""
    for trained, pairs in groupby(zip(written.tokens, written.mask, strict=True), key=itemgetter(1)):
        if trained:
            yield family.decode([token for token, _ in pairs], skip_special=False)


def _print_shown(shown: dict[str, Any]) -> None:
    from relax_plugin_workbench.task_page import medium_facts

    say(f"{shown['where']} ({shown['id']}), {len(shown['ids'])} tokens\n")
    say(SEPARATOR.join(token.replace("\n", "⏎\n") for token in shown["tokens"]) + "\n")
    say(f"ids       {' '.join(map(str, shown['ids']))}")
    for text in shown.get("trained", ()):
        say(f"trained   {text}")
    for medium in shown["media"]:
        say(f"{medium['kind']:<9} {medium['source']}: {medium.get('error') or medium_facts(medium)}")
    say(f"answer    {json.dumps(shown['answer'], ensure_ascii=False)}")
    for name, value in shown["metadata"].items():
        say(f"{name:<9} {json.dumps(value, ensure_ascii=False)}")
    say(f"a turn ends with {' or '.join(shown['ends_with']) or 'nothing: the model has no end-of-turn token'}")
