# SPDX-License-Identifier: Apache-2.0
"""Answers about the autoscaler of a run, from the files of its run directory: signals, proposals and changes.

They have the fields of the autoscaler of rednote's Relax. The names of signals are those of `Signals`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_core.api import Autoscale, ConfigError
from relax_core.runs import RunView, health, scaling_of
from relax_plugin_scaling.limits import POOL

BY_POLICY = "autoscale-"
"""Start of the key of every change by a policy."""
MAX_HISTORY = 1000


def autoscaler_status(view: RunView, wall: float) -> dict[str, Any]:
    """Return whether the policy of a run is on, its limits, its newest proposal and signals, and the changes by it."""
    table, on, decided, signals = _table(view), True, None, dict[str, Any]()
    for record in view.events():
        match record["event"]:
            case "run started" | "run restarted":
                on = True
            case "logged" if "enabled" in record["fields"] and record["role"] == "controller":
                on = bool(record["fields"]["enabled"])
            case "logged" if record["level"] == "error" and record["role"] == POOL:
                on = on and "scaling policy is off" not in record["message"]
            case "scaling proposed":
                decided = record
            case "engines measured":
                signals = record["signals"]
    state, changes = health(view, wall), scale_history(view, MAX_HISTORY)
    pool = scaling_of(view).get(POOL)
    running = bool(table) and not state.ended and state.state != "lost"
    last = next((one for one in changes["history"] if one["status"] != "NOOP"), None)
    return {
        "enabled": running and on, "running": running,
        "current_engines": len(pool.engines) if pool and running else 0,
        "min_engines": len(pool.protected) if pool else 1, "max_engines": table.get("max_engines"),
        "last_scale_time": last and last["triggered_at"], "last_scale_action": last and last["action"],
        "last_decision": decided and {key: decided[key] for key in ("size", "wanted", "target", "reason", "held_by")},
        "pending_requests": [one for one in changes["history"] if one["completed_at"] is None],
        "recent_metrics": signals, "config": table, "total_scale_operations": changes["total_count"],
    }  # fmt: skip


def autoscaler_conditions(view: RunView, wall: float) -> dict[str, Any]:
    """Return the newest signals and what the policy concluded from them; a policy's conditions are its own."""
    status = autoscaler_status(view, wall)
    decided = status["last_decision"]
    return {
        "conditions": {} if decided is None else {"proposal": decided},
        "metrics": status["recent_metrics"],
        "observations": {},
    }


def autoscaler_health(view: RunView, wall: float) -> dict[str, Any]:
    """Return whether the policy of a run is on."""
    status = autoscaler_status(view, wall)
    state = "healthy" if status["running"] else "stopped"
    return {"status": state, "enabled": status["enabled"], "service": "autoscaler"}


def scale_history(view: RunView, limit: int = 100, action: str | None = None) -> dict[str, Any]:
    """Return the changes that the policy asked for, newest first; `action`: only `scale_out` or `scale_in`.

    The run remembers the newest changes of a pool. Raises ConfigError for another action or limit.
    """
    if action not in (None, "scale_out", "scale_in"):
        raise ConfigError("action", action, "give scale_out or scale_in, or leave it out")
    if not 0 < limit <= MAX_HISTORY:
        raise ConfigError("limit", limit, f"give 1 to {MAX_HISTORY}")
    proposals = [one for one in view.events() if one["event"] == "scaling proposed" and one["target"] is not None]
    pool, found = scaling_of(view).get(POOL), list[dict[str, Any]]()
    for one in reversed(pool.operations.values() if pool else ()):
        if not one.key.startswith(BY_POLICY):
            continue
        while proposals and proposals[-1]["target"] != one.target:
            proposals.pop()  # newer than this change
        found.append({
            "request_id": one.id, "action": "scale_out" if one.target >= one.before else "scale_in",
            "status": one.state.upper(), "triggered_at": one.requested_at,
            "completed_at": None if one.open else one.changed_at, "from_engines": one.before, "to_engines": one.target,
            "delta": abs(one.target - one.before), "reason": proposals.pop()["reason"] if proposals else "",
            "triggered_conditions": [],
            "error_message": one.detail if one.state in ("failed", "partial", "refused") else None,
        })  # fmt: skip
    chosen = [one for one in found if action in (None, one["action"])]
    return {"history": chosen[:limit], "total_count": len(found), "action_filter": action, "limit": limit}


def enable(view: RunView, enabled: bool, wall: float) -> dict[str, Any]:
    """Turn the policy of a live run on or off; return the answer. Raises ConfigError if the run has no policy."""
    state = health(view, wall)
    if not _table(view):
        raise ConfigError("autoscale", "no such table", "set [autoscale] when you start a run")
    if state.ended or state.state == "lost":
        raise ConfigError("run", f"{view.name}, which is {state.state}", "turn the policy of a live run on or off")
    view.send(Autoscale(enabled))
    return {"status": "ok", "enabled": enabled, "message": f"the run turns its policy {'on' if enabled else 'off'}"}


def _table(view: RunView) -> dict[str, Any]:
    """Return the table `[autoscale]` of a run; empty if it has none."""
    table = view.config.get("autoscale") or {}
    return dict(table) if isinstance(table, Mapping) else {"name": table}
