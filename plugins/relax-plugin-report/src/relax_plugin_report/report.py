# SPDX-License-Identifier: Apache-2.0
"""The report of a run: `reward.png`, and `report.html`, a single page without network access or scripts.

This module collects the run's data; the page is the template `report.html.j2`, which escapes all values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from relax_core.api.errors import printable
from relax_core.api.events import describe
from relax_core.runs import (
    MEDIA_CSS,
    Metrics,
    RunHealth,
    RunView,
    disk_errors,
    first_step_faults,
    health,
    log_prob_difference,
    mean,
    medium_figure,
    metric,
    mismatch_warning,
    readable,
    recorded_event,
    seconds,
    slow_rank_warning,
    write_text,
)
from relax_plugin_report import charts
from relax_plugin_report.transcript import Transcript, transcript

SHOWN = 6
"""Most transcripts per chapter."""
_CHARTS = (
    "length/mean", "lag/mean", "policy/entropy", "policy/ref_kl", "policy/importance_clipped", "train/loss", "train/grad_norm",
    "train/rollout_log_prob_diff", "train/rollout_log_prob_diff_lag0_p99", "train/rollout_kl",
    "tokens/per_s", "tokens/per_busy_s", "time/step_s", "time/wait_rows_s",
    "time/bubble_fraction",
)  # fmt: skip
_LAG = "lag/samples/"


def write_report(run_dir: Path | str) -> Path:
    """Write `reward.png` and `report.html` into the run directory; return the path of the page."""
    run = RunView(Path(run_dir))
    picture, page = run.path / "reward.png", run.path / "report.html"
    with readable(run.path):
        metrics = run.metrics()
        drawn = charts.reward_picture(run.name, metrics.points("reward/mean"), _evals(metrics))
        written = render(run, metrics, time.time())
    with disk_errors(picture):
        drawn.write_png(picture)
    write_text(page, written)
    return page


def render(run: RunView, metrics: Metrics, wall: float) -> str:
    """Return the page at wall-clock time `wall`."""
    from jinja2 import Environment, StrictUndefined

    source = resources.files("relax_plugin_report").joinpath("report.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
    state, summary = health(run, wall), run.summary()
    spent, reward = _time_spent(metrics), metrics.points("reward/mean")
    curves: dict[str, charts.Points] = {"reward": reward, "smoothed": charts.smoothed(reward)} if reward else {}
    lags = {int(key[len(_LAG) :]): sum(metrics.column(key)) for key in metrics.names() if key.startswith(_LAG)}
    page = template.render(
        name=run.name,
        state=state.state,
        subtitle=_subtitle(run, state, metrics),
        error=summary.get("error", "") if state.ended else state.detail,
        odd=[*filter(None, [mismatch_warning(run), slow_rank_warning(run)]), *first_step_faults(run)],
        first_steps=[(step, check) for step, checks in run.first_steps().items() for check in checks],
        cards=list(_cards(summary, metrics)),
        reward_curve=Markup(charts.lines(curves, _evals(metrics), "reward per step").svg()),
        eval_sets=list(_evals(metrics)),
        evals=list(_eval_rows(summary, metrics)),
        account=list(_account(summary, metrics)),
        balance=_balance(summary, metrics),
        lag_bars=Markup(charts.bars({str(lag): lags[lag] for lag in sorted(lags)}, "lag of trained samples").svg()),
        lengths=list(_lengths(summary)),
        time_bars=Markup(charts.stacked_bars(spent, "busy, waiting and idle time by role").svg()),
        waits=list(_waits(metrics, spent)),
        publishing=list(_publishing(metrics)),
        charts=list(_charts(metrics)),
        faults=[
            (record["time"][11:19], *fault) for record in run.events() if (fault := describe(recorded_event(record)))
        ],
        chapters=list(_chapters(run)),
        element=lambda medium: _element(run, medium),
        media_css=Markup(MEDIA_CSS),
        origin=list(_origin(run)),
        config=(run.path / "config.toml").read_text(encoding="utf-8"),
    )
    return printable(page)  # the whole page, because texts of the model and names occur in many places


def _subtitle(run: RunView, state: RunHealth, metrics: Metrics) -> str:
    steps = run.status().get("steps")
    done = metrics[-1]["step"] if metrics else 0
    spoke = f", last status {seconds(state.said_s_ago)} ago" if state.said_s_ago is not None and not state.ended else ""
    return f"{done}{f' of {steps}' if steps else ''} steps{spoke}"


def _cards(summary: Mapping[str, Any], metrics: Metrics) -> Iterator[tuple[str, str]]:
    reward = metrics.column("reward/mean")
    first, last = summary.get("reward_first", mean(reward[:10])), summary.get("reward_last", mean(reward[-10:]))
    if first is not None and last is not None:
        yield "reward, first and last 10 steps", f"{first:.3f} → {last:.3f}"
    for name, points in _evals(metrics).items():
        yield f"held-out {name}", f"{points[0][1]:.3f} → {points[-1][1]:.3f}"
    shown: tuple[tuple[str, str, Any], ...] = (
        ("wall time", "wall_seconds", seconds),
        ("start-up", "startup_seconds", seconds),
        ("tokens per second", "tokens_per_second", "{:,.0f}".format),
        ("tokens generated", "tokens_generated", "{:,}".format),
        ("largest lag", "max_lag", str),
        ("weight publishes", "weight_publishes", str),
    )
    for label, key, form in shown:
        if summary.get(key) is not None:
            yield label, form(summary[key])
    if (far := log_prob_difference(metrics)) is not None:
        yield "engine and trainer, |log-prob difference|", f"{far:.2g}"
    restarts = summary.get("restarts") or {}
    if restarts:
        yield "restarts", ", ".join(f"{role} {count}" for role, count in restarts.items())
    if guards := summary.get("guards"):
        yield "guards that fired", ", ".join(f"{name} {count}" for name, count in guards.items())
    if dropped := summary.get("events_dropped"):
        yield "events missing in this report", f"{dropped:,}"


def _evals(metrics: Metrics) -> dict[str, list[tuple[int, float]]]:
    keys = [key for key in metrics.names() if key.startswith("eval/") and key.count("/") == 2]
    names = [key[len("eval/") : -len("/mean")] for key in keys if key.endswith(("/mean", "/loss"))]
    return {name: metrics.points(f"eval/{name}/mean") or metrics.points(f"eval/{name}/loss") for name in names}


def _eval_rows(summary: Mapping[str, Any], metrics: Metrics) -> Iterator[tuple[str, ...]]:
    for name, points in _evals(metrics).items():
        counts, heats = metrics.column(f"eval/{name}/count"), metrics.column(f"eval/{name}/temperature")
        errors = dict(metrics.points(f"eval/{name}/standard_error"))
        ends = [
            f"{value:.3f}{f' ± {errors[step]:.3f}' if step in errors else ''} (step {step})"
            for step, value in (points[0], points[-1])
        ]
        yield name, *ends, f"{counts[-1]:.0f}" if counts else "", f"{heats[-1]:g}" if heats else ""


def _account(summary: Mapping[str, Any], metrics: Metrics) -> Iterator[tuple[str, str]]:
    last = _last(metrics)
    for label, key, column in (
        ("issued", "samples_issued", "samples/issued"),
        ("trained", "samples_trained", "samples/trained"),
        ("trained without gradient", "", "samples/no_gradient"),
        ("in flight", "samples_in_flight", "samples/in_flight"),
    ):
        value = summary.get(key, last.get(column))
        if value is not None:
            yield label, f"{value:,.0f}"
    for reason, count in _dropped(summary, last).items():
        yield f"dropped: {reason}", f"{count:,.0f}"


def _balance(summary: Mapping[str, Any], metrics: Metrics) -> str:
    last = _last(metrics)
    issued, trained, flying = (
        summary.get(f"samples_{name}", last.get(f"samples/{name}")) for name in ("issued", "trained", "in_flight")
    )
    if issued is None or trained is None or flying is None:
        return "The run has no sample counts."
    dropped = sum(_dropped(summary, last).values())
    sign = "=" if issued == trained + dropped + flying else "≠"
    return f"issued {issued:,.0f} {sign} trained {trained:,.0f} + dropped {dropped:,.0f} + in flight {flying:,.0f}"


def _dropped(summary: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, float]:
    prefix = "samples/dropped/"
    by_reason = {key.removeprefix(prefix): value for key, value in last.items() if key.startswith(prefix)}
    return dict(summary.get("samples_dropped") or by_reason)


def _lengths(summary: Mapping[str, Any]) -> Iterator[tuple[str, Markup]]:
    """Yield histograms of the lengths of trained samples, and of dropped samples by reason.

    The histograms show whether dropping slow samples favours short samples.
    """
    dropped = summary.get("dropped_lengths") or {}
    if not dropped:
        return
    for what, lengths in (("trained", summary.get("trained_lengths") or {}), *sorted(dropped.items())):
        # The bus counts lengths in powers of two; -1 counts samples that were dropped before their length was known.
        named = {-1: "unknown", 0: "0"}
        bins = {named.get(length, f"≤ {length:,}"): float(lengths[str(length)]) for length in sorted(map(int, lengths))}
        if bins:
            yield what, Markup(charts.bars(bins, f"lengths: {what}").svg())


def _time_spent(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Return the busy, waiting and idle seconds of every role that reports them, summed over steps."""
    names = [key.split("/")[1] for key in metrics.names() if key.startswith("time/") and key.endswith("/busy_s")]
    spent = {
        name: {part: float(sum(metrics.column(f"time/{name}/{part}_s"))) for part in ("busy", "wait", "idle")}
        for name in names
    }
    return {name: parts for name, parts in spent.items() if sum(parts.values()) > 0}


def _waits(metrics: Metrics, spent: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, str]]:
    """Yield for each role the roles that it waited for, longest first."""
    for role, parts in spent.items():
        prefix, total = f"time/{role}/wait/", sum(parts.values())
        keys = [key for key in metrics.names() if key.startswith(prefix)]
        waits = {key.removeprefix(prefix).removesuffix("_s"): sum(metrics.column(key)) for key in keys}
        longest = sorted(((who, value) for who, value in waits.items() if value), key=lambda wait: -wait[1])
        if longest:
            yield f"{role} waited for", ", ".join(f"{who} {seconds(s)} ({s / total:.0%})" for who, s in longest)


def _publishing(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """Yield the mean time of each part of a weight publish, in order of execution."""
    prefix, order = "time/publish/", ("gather", "hash", "write", "wire", "load", "proof")
    keys = [key for key in metrics.names() if key.startswith(prefix)]
    times = {key.removeprefix(prefix).removesuffix("_s"): metrics.column(key) for key in keys}
    for part in sorted(times, key=lambda part: (order.index(part) if part in order else len(order), part)):
        yield part, f"{sum(times[part]) / len(times[part]) * 1e3:,.1f} ms"


def _charts(metrics: Metrics) -> Iterator[tuple[str, str, Markup]]:
    for key in _CHARTS:
        points = metrics.points(key)
        if len(points) > 1:
            registered = metric(key)
            yield (
                key,
                registered.help if registered else "",
                Markup(charts.lines({key: points}, {}, key, (360, 170)).svg()),
            )


def _chapters(run: RunView) -> Iterator[tuple[str, list[Transcript]]]:
    steps = run.sample_steps()
    for step, title in zip(dict.fromkeys((*steps[:1], *steps[-1:])), ("First", "Last"), strict=False):
        shown = run.samples(step)[:SHOWN]
        if shown:
            yield f"{title} transcripts (step {step})", [transcript(sample) for sample in shown]


def _element(run: RunView, medium: Mapping[str, Any]) -> Markup:
    kind, key = str(medium.get("type")), str(medium.get("key") or "")
    return Markup(medium_figure(kind, run.preview(kind, key), f"{kind} {medium.get('source') or ''}".strip()))


def _origin(run: RunView) -> Iterator[tuple[str, str]]:
    came = run.document("provenance")
    git, hardware, packages = came.get("git") or {}, came.get("hardware") or {}, came.get("packages") or {}
    if git:
        yield "commit", f"{git.get('commit')}{' with local changes' if git.get('dirty') else ''}"
    if came.get("python"):
        yield "python", str(came["python"].get("version"))
    if hardware:
        memory = float(hardware.get("memory_bytes") or 0) / 2**30
        yield "machine", f"{hardware.get('processor')}, {hardware.get('cores')} cores, {memory:.0f} GiB"
        yield "gpus", ", ".join(hardware.get("gpus") or []) or "none"
    main = ("relax-core", "torch", "transformers", "ray", "vllm", "sglang")
    versions = [f"{name} {packages[name]}" for name in main if name in packages]
    if versions:
        yield "packages", ", ".join(versions)


def _last(metrics: Metrics) -> dict[str, Any]:
    """Return the metrics of the last step that has sample counts; a later evaluation has none."""
    return next((record for record in reversed(metrics) if "samples/issued" in record), {})
