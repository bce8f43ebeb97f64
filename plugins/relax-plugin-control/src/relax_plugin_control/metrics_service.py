# SPDX-License-Identifier: Apache-2.0
"""The metrics service of rednote's Relax, so that its scripts log into the metrics and sinks of a run.

The run itself holds the values of a step until the step has finished: see `RunView.log_metrics`. So `report_step` has nothing
to send, and values that no script reports are recorded, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from relax_core.api import ClearMetrics, ConfigError, LogMetrics
from relax_core.runs import Refused, RunControl, RunView, health

USER = "user/"


def log_metric(api: RunControl, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Log one value. Raises Refused."""
    return log_metrics_batch(api, {**fields, "metrics": {_given(fields, "metric_name"): fields.get("metric_value")}})


def log_metrics_batch(api: RunControl, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Log the values of a step, as `user/NAME` unless a name begins so. Raises Refused."""
    named = {name if name.startswith(USER) else USER + name: value for name, value in _given(fields, "metrics").items()}
    _refusing(lambda: api.view.log(LogMetrics(named, fields.get("step"))))
    said = "the step that is trained now" if fields.get("step") is None else f"step {fields['step']}"
    return {"status": "success", "message": f"{len(named)} metrics logged for {said}, with names from {USER}"}


def report_step(api: RunControl, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Answer when the values of a step are recorded. The state of the run does not change. Raises Refused."""
    step, done = _given(fields, "step"), int(api.view.status().get("step", 0))
    when = "are recorded" if step <= done else f"are recorded with the step; the run has finished step {done}"
    return {"status": "success", "message": f"metrics of step {step} {when}", "results": {}}


def clear_metrics(api: RunControl, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Let the run forget values of steps that have not finished. Raises Refused."""
    _refusing(lambda: api.view.log(ClearMetrics(fields.get("step"))))
    return {"status": "success", "message": "values of steps that have not finished are cleared; recorded values stay"}


def log_error(api: RunControl, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Record an error in the log of the run. Raises Refused."""
    message, traceback = _given(fields, "error_message"), fields.get("error_traceback", "")
    _refusing(lambda: api.view.log_error(message, traceback))
    return {"status": "success", "message": "recorded in the log of the run, with the role program"}


def query_metrics(view: RunView, step: int | None) -> dict[str, Any]:
    """Return the recorded metrics of a step; None: of the newest step. An unknown step has none."""
    rows = [row for row in view.metrics() if step is None or row["step"] == step]
    return {"status": "success", "message": "", "metrics": rows[-1] if rows else {}}


def service_health(view: RunView) -> dict[str, Any]:
    """Return whether the run records what scripts log, and its sinks."""
    state = health(view, time.time())
    sinks = [str(one.get("name", "") if isinstance(one, Mapping) else one) for one in view.config.get("sinks", ())]
    live = not state.ended and state.state != "lost"
    return {
        "status": "healthy" if live else "stopped", "service": "metrics", "adapters": sinks, "wandb_enabled": "wandb" in sinks,
    }  # fmt: skip


def _given(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise Refused(400, name, "nothing", "give this field")
    return fields[name]


def _refusing(log: Callable[[], None]) -> None:
    """Log something. Raises Refused with the status of the error."""
    try:
        log()
    except ConfigError as error:
        status = {"run": 409, "commands": 503}.get(error.field, 400)
        raise Refused(status, error.field, str(error.got), error.fix) from error
