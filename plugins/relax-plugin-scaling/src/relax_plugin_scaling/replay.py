# SPDX-License-Identifier: Apache-2.0
"""The command `relax autoscale`: replay a scaling policy on the signals of a recorded run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer

from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.events import EnginesMeasured, Logged
from relax_core.api.scaling import ScalingPolicy, Signals
from relax_core.cli.terminal import AsJson, print_json, print_table, say, split
from relax_core.launch import plan_run
from relax_core.runs import open_run, readable, recorded_event
from relax_plugin_scaling.autoscaler import Autoscaler, AutoscalerState

MEASURED = "engines measured"
"""Name of the records in `events.jsonl` that have signals."""


def autoscale(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The recorded run: a directory, or a name under ./runs.")],
    configuration: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILES] [KEY=VALUE]", help="The configuration of the policy; default: the run's own."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a scaling policy on the signals of a recorded run.

    `relax autoscale my-run autoscale=balance` prints when the policy would have changed the number of engines. Signals are
    recorded also by a run without a policy. The recorded run did not obey the policy, so a proposal may come again.
    """
    view = open_run(run)
    sources, overrides = split(configuration or [])
    planned = plan_run(sources or [str(view.path / "config.toml")], overrides, on_disk=bool(sources))
    config, catalogue = planned.composed.config, planned.catalogue
    if config.autoscale is None:
        raise ConfigError("autoscale", "nothing", "name a scaling policy, such as autoscale=balance")
    with readable(view.path):
        windows = list(recorded_signals(view.events()))
    if not windows:
        raise ConfigError("RUN", run, "its events.jsonl has no engine signals: choose a run of at least 10 s")
    policy = catalogue.build(config.autoscale.chosen, ScalingPolicy)
    autoscaler, proposals = Autoscaler(policy, config.autoscale, config.placement.rollout.least), []
    state: AutoscalerState | None = autoscaler.start()
    for signals in windows:
        state, event = autoscaler.decide(state, signals, signals.at)
        if isinstance(event, Logged):
            raise PluginError(config.autoscale.name, event.message, event.fields["frames"])
        if event is not None:
            proposals.append({"seconds": round(signals.at - windows[0].at, 3), **asdict(event)})
    if as_json:
        document = {"policy": config.autoscale.name, "windows": len(windows), "proposals": proposals}
        print_json({"schema": "relax.autoscale/1", **document})
        return
    spanned_s = windows[-1].at - windows[0].at
    said = f"{config.autoscale.name} on {len(windows)} windows of {view.name} in {spanned_s:.0f} s"
    say(f"{said}; the recorded run did not obey the policy")
    if not proposals:
        say("no proposal: the policy keeps the number of engines")
        return
    rows = [
        (
            f"{each['seconds']:.0f}",
            *(str(each[key] or "-") for key in ("size", "wanted", "target", "held_by", "reason")),
        )
        for each in proposals
    ]
    print_table(("second", "engines", "wanted", "target", "limit", "reason"), rows)


def recorded_signals(records: Iterable[Mapping[str, Any]]) -> Iterator[Signals]:
    """Yield the signals in the records of `events.jsonl`, with times of the wall clock, which all starts share."""
    for record in records:
        if record["event"] == MEASURED and isinstance(event := recorded_event(record), EnginesMeasured):
            yield Signals.from_plain({**event.signals, "at": datetime.fromisoformat(record["time"]).timestamp()})
