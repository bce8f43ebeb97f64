# SPDX-License-Identifier: Apache-2.0
"""The documents of `relax status`, `relax why` and `relax engines`, for the command line and the control API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from relax_core.api.errors import ConfigError
from relax_core.api.run_commands import ScaleRequest
from relax_core.engines.scaling import Action, PoolScaling, ScalingOperation
from relax_core.observe.status import heartbeats
from relax_core.views.display import doing
from relax_core.views.run import RunView, health, listed, readable_documents
from relax_core.views.why import failures_say, first_step_faults, mismatch_warning, slow_rank_warning, why


def status_answer(view: RunView, wall: float) -> dict[str, object]:
    """Return a run's progress, reward and roles; `doing` and `remarks` are for people."""
    with readable_documents(view):
        line, state, written = listed(view, wall), health(view, wall), view.status()
        roles = written.get("roles", [])
        beats = heartbeats(written) if written and not state.ended else ()
        acting = [{"role": str(beat.role), "state": str(beat.state), "doing": str(doing(beat, wall))} for beat in beats]
        faults = first_step_faults(view)
        remarks = [*(said for role in roles for said in failures_say(role)), *faults]
        first_steps = view.first_steps()
        checks = {step: [check.plain() for check in found] for step, found in first_steps.items()}
    if first_steps and not faults:
        passed = sum(check.state == "ok" for found in first_steps.values() for check in found)
        remarks.append(f"step 1: all {passed} checks passed")
    return {
        "schema": "relax.run-status/1", **asdict(line), "said_s_ago": state.said_s_ago, "detail": state.detail,
        "roles": roles, "first_steps": checks, "doing": acting, "remarks": remarks,
    }  # fmt: skip


def why_answer(view: RunView, wall: float) -> dict[str, object]:
    """Return what a run waits for; `lines` are for people."""
    with readable_documents(view):
        answer = why(view.status(), health(view, wall), wall, view.events())
        warnings, faults = [*filter(None, (mismatch_warning(view), slow_rank_warning(view)))], first_step_faults(view)
        lines = [*answer.lines(), *warnings, *faults]
        return {
            "schema": "relax.why/1", "run": view.name, "culprit": answer.culprit, **asdict(answer),
            "warning": "; ".join(warnings), "first_step": faults, "lines": lines,
        }  # fmt: skip


def engines_answer(view: RunView, wall: float) -> dict[str, object]:
    """Return the engines of all pools as the run last described them; empty for a run that has ended."""
    with readable_documents(view):
        state, roles = health(view, wall), view.status().get("roles", [])
        operations = [asdict(one) for pool in scaling_of(view).values() for one in pool.operations.values()]
        engines: list[dict[str, object]] = []
        for facts in (role.get("facts") or {} for role in roles):
            steps: dict[str, str] = {}
            for scaling in (facts.get("scaling") or {}).values():
                if (operation := PoolScaling.of(scaling).open) is not None:
                    steps |= {name: step for name, step in operation.engines.items() if step != "active"}
            for pool, described in {"rollout": facts, **(facts.get("pools") or {})}.items():
                for name, engine in (described.get("engines") or {}).items():
                    step = steps.get(name) or engine.get("state", "")
                    engines.append({"pool": pool, "engine": name, **engine, "state": step})
    return {
        "schema": "relax.engines/1", "run": view.name, "state": state.state,
        "engines": [] if state.ended else engines, "operations": [] if state.ended else operations,
    }  # fmt: skip


def scaling_of(view: RunView) -> dict[str, PoolScaling]:
    """Return a copy of the machine of each engine pool that the run last described."""
    roles = view.status().get("roles", [])
    found = {name: one for role in roles for name, one in ((role.get("facts") or {}).get("scaling") or {}).items()}
    return {name: PoolScaling.of(one) for name, one in found.items()}


def try_scaling(
    pools: Mapping[str, PoolScaling], request: ScaleRequest, wall: float
) -> tuple[ScalingOperation, list[Action]]:
    """Return the operation and the actions that a request would lead to now, without an effect.

    Raises ConfigError if its pool would refuse the request.
    """
    if request.pool not in pools:
        known = f"name a pool of the run: {', '.join(pools)}" if pools else "wait until its rollout has started"
        raise ConfigError("pool", request.pool, known)
    return PoolScaling.of(pools[request.pool].plain()).ask(request, wall)


def try_draining(
    pools: Mapping[str, PoolScaling], request: ScaleRequest, wall: float
) -> list[tuple[ScalingOperation, list[Action]]]:
    """Return what the drain of a node would lead to now in each pool with engines that can leave, without an effect.

    Raises ConfigError if one of these pools would refuse the request, and if there is no such pool.
    """
    there = {name: one for name, one in pools.items() if one.on_node(request.node)}
    if not there:
        known = sorted({one.nodes[name] for one in pools.values() for name in one.engines if name in one.nodes})
        raise ConfigError("node", request.node, f"name a node with engines: {', '.join(known) or 'none'}")
    free = [name for name, one in there.items() if not set(one.on_node(request.node)) <= set(one.protected)]
    return [try_scaling(pools, replace(request, pool=name), wall) for name in free or there]


def scale_plan(name: str, planned: Iterable[tuple[ScalingOperation, Iterable[Action]]]) -> dict[str, object]:
    """Return what `relax scale --dry-run` prints with `--json`; `planned`: the operation and the actions of each pool."""
    found = [(asdict(operation), list(actions)) for operation, actions in planned]
    steps = [{"action": type(one).__name__.lower(), "engine": one.engine} for _, actions in found for one in actions]
    return {"schema": "relax.scale-plan/2", "run": name, "operations": [one for one, _ in found], "actions": steps}


ANSWERS: Mapping[str, Callable[[RunView, float], dict[str, Any]]] = {
    "status": status_answer, "why": why_answer, "engines": engines_answer,
}  # fmt: skip
"""Verb, which is also the route -> its document at a wall-clock time."""
