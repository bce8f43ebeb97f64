# SPDX-License-Identifier: Apache-2.0
"""The routes with which scripts scale a rollout of rednote's Relax, answered by operations of the control API.

`num_replicas` is the number of engines that the pool `model_name` is to have; `engine_urls` are the addresses of engines that
`relax engine serve` serves elsewhere, which join or leave. A request for what the pool has, or is about to have, changes
nothing, so these routes also take requests without an Idempotency-Key.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from relax_core.api.run_commands import Evaluate, ScaleRequest
from relax_core.runs import ControlOperation, Facts, PoolScaling, Refused, RunControl, expected

Way = Literal["scale_out", "scale_in"]
DEFAULT = "default"
"""Name of the rollout's pool there."""
INSTEAD: Mapping[str, str] = {
    "/rollout/evaluate": "use POST /rollout/evaluate; a GET changes nothing",
    "/rollout/recover_rollout_engines": "send nothing: failed engines are replaced by themselves",
    "/rollout/can_do_update_weight_for_async": "send nothing: the trainer publishes weights by itself",
    "/rollout/end_update_weight": "send nothing: the trainer publishes weights by itself",
    "/rollout/stop_service": "use POST /stop; a GET changes nothing",
    "/rollout/set_step": "use relax resume RUN@STEP: the step of a live run can't be set",
    "/rollout/get_step": "use GET /status",
    "/rollout/v1/chat/completions": "use environment = \"agent\": each agent gets an address as OPENAI_BASE_URL",
}  # fmt: skip
"""Route that is not here -> what to do instead."""


def scale(api: RunControl, way: Way, fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Ask for the engines of a request; return the answer. Raises Refused.

    `force` changes nothing: the requests of an engine that leaves move to other engines at once.
    """
    if (timeout_s := fields.get("timeout_secs", 1)) <= 0:
        raise Refused(400, "timeout_secs", f"{timeout_s}", "give a number of seconds above 0, or leave it out")
    if fields.get("engine_urls") and not fields.get("num_replicas"):
        return _scale_addresses(api, way, fields, key)
    if "num_replicas" not in fields:
        fix = "give the number of engines that the pool is to have, or engine_urls"
        raise Refused(400, "num_replicas", "nothing", fix)
    name, target = _pool(fields.get("model_name", DEFAULT)), fields["num_replicas"]
    facts, timeout_s = api.facts(), float(fields.get("timeout_secs", 0))
    asked = ScaleRequest(key or uuid.uuid4().hex, name, target, timeout_s=timeout_s)
    pool = facts.pools.get(name)
    have = 0 if pool is None else pool.open.target if pool.open else len(pool.engines)
    if pool is not None and ((target <= have) if way == "scale_out" else (target >= have)):
        return {"request_id": "", "status": "NOOP", "message": f"the pool {name} has {have} engines"}
    return _ask(api, asked, facts, bool(fields.get("dry_run")))


def _scale_addresses(api: RunControl, way: Way, fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Ask for the join or leave of engines at addresses. Addresses where nothing is to change are left out."""
    name, facts, key = _pool(fields.get("model_name", DEFAULT)), api.facts(), key or uuid.uuid4().hex
    wanted = [_address(url) for url in fields["engine_urls"]]
    pool = facts.pools.get(name)
    there = {} if pool is None else {address: engine for engine, address in pool.external.items()}
    if pool is not None and pool.open is not None and pool.open.address:
        there |= dict.fromkeys(pool.open.address.split(","), "")
    if way == "scale_out":
        joining = ",".join(address for address in wanted if address not in there)
        asked = ScaleRequest(key, name, address=joining, timeout_s=float(fields.get("timeout_secs", 0)))
    else:
        asked = ScaleRequest(key, name, engine=",".join(filter(None, (there.get(address) for address in wanted))))
    if pool is not None and not (asked.address or asked.engine):
        said = "serve or join already" if way == "scale_out" else f"are not in the pool {name}"
        return {"request_id": "", "status": "NOOP", "message": f"the engines at {', '.join(wanted)} {said}"}
    return _ask(api, asked, facts, bool(fields.get("dry_run")))


def _address(url: object) -> str:
    """Return `HOST:PORT` of an engine's address, with or without `http://`. Raises Refused."""
    address = str(url).removeprefix("http://").rstrip("/")
    host, _, port = address.rpartition(":")
    if not isinstance(url, str) or not host or not port.isdecimal() or set("/,@ ") & set(address):
        fix = "give http://HOST:PORT or HOST:PORT of `relax engine serve`; another server, such as SGLang's, can't join"
        raise Refused(400, "engine_urls", repr(url)[:80], fix)
    return address


def _ask(api: RunControl, asked: ScaleRequest, facts: Facts, dry_run: bool) -> dict[str, Any]:
    if dry_run:
        ((planned, actions),) = expected(asked, facts, time.time())
        said = f"a dry run: from {planned.before} to {planned.target} engines"
        selected = [one.engine for one in actions]
        return {"request_id": "", "status": "NOOP", "message": said, "selected_engines": selected}
    operation, _ = api.ask(asked, asked.key)
    found = described(operation, facts.pools)
    return {"request_id": operation.id, "status": found["status"], "message": operation.detail}


def evaluate(api: RunControl, train_step: int, key: str) -> dict[str, Any]:
    """Ask for an evaluation of the newest weights, unless one is open; return the answer. Raises Refused."""
    running = _evaluations(api)
    operation = running[0] if running else api.ask(Evaluate(), key or uuid.uuid4().hex)[0]
    return {"status": "ok", "rollout_id": train_step, "request_id": operation.id}


def is_eval_done(api: RunControl) -> dict[str, Any]:
    """Return whether the evaluation that was asked for through this API has ended, well or not."""
    return {"done": not _evaluations(api)}


def _evaluations(api: RunControl) -> list[ControlOperation]:
    api.settle()
    found = api.book.operations.values()
    return [one for one in found if one.action == "evaluate" and one.state == "requested"]


def requests(api: RunControl, way: Way, model_name: str | None, status: str | None) -> dict[str, Any]:
    """Return the requests of one way, newest first; `model_name` and `status` filter them."""
    pools = api.facts().pools
    found = [described(one, pools) for one in _asked(api) if _way(one, pools) == way]
    if model_name is not None:
        found = [one for one in found if one["model_name"] == _pool(model_name)]
    if status is not None:
        found = [one for one in found if one["status"] == status.upper()]
    return {"requests": found, "total_count": len(found), "model_name": model_name, "status_filter": status}


def request(api: RunControl, way: Way, wanted: str) -> dict[str, Any]:
    """Return the request with this id. Raises Refused if the run remembers no such request."""
    pools = api.facts().pools
    return described(_find(api, way, wanted, pools), pools)


def cancel(api: RunControl, wanted: str, key: str) -> dict[str, Any]:
    """Let the engines of a request to scale out leave again; return the answer. Raises Refused."""
    pools = api.facts().pools
    one = _find(api, "scale_out", wanted, pools)
    asked = _cancellation(one, pools, key or uuid.uuid4().hex)
    api.ask(asked, asked.key)
    return {"request_id": one.id, "status": "CANCELLED", "message": "its engines leave"}


def cancel_all(api: RunControl, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Cancel the open requests to scale out, or those with the status `status_filter`; return the answer.

    `dry_run`: only tell which would be cancelled.
    """
    model_name, status, dry_run = fields.get("model_name"), fields.get("status_filter"), fields.get("dry_run", False)
    facts, succeeded, skipped = api.facts(), list[str](), list[dict[str, str]]()
    listed = requests(api, "scale_out", model_name, status)["requests"]
    wanted = [api.book.operations[one["request_id"]] for one in listed]
    for one in wanted if status is not None else [one for one in wanted if one.state == "requested"]:
        try:
            asked = _cancellation(one, facts.pools, uuid.uuid4().hex)
            if dry_run:
                expected(asked, facts, time.time())
            else:
                api.ask(asked, asked.key)
        except Refused as error:
            skipped.append({"id": one.id, "reason": str(error)})
        else:
            succeeded.append(one.id)
    filters = {"model_name": model_name, "status_filter": status}
    count = len(succeeded) + len(skipped)
    return {"succeeded": succeeded, "skipped": skipped, "total_count": count, "dry_run": dry_run, "filters": filters}


def engines(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the engines by pool, from those of `GET /engines`. Only engines from elsewhere have an address."""
    models: dict[str, Any] = {}
    for one in found:
        own = {
            "engine_id": one["engine"], "url": one.get("address", ""), "status": one["state"].upper(),
            "is_healthy": bool(one.get("serving")),
        }  # fmt: skip
        models.setdefault(one["pool"], {"engines": []})["engines"].append(own)
    return {"models": models, "total_engines": len(found)}


def described(one: ControlOperation, pools: Mapping[str, PoolScaling]) -> dict[str, Any]:
    """Return an operation that scales, in the fields of a request."""
    pool = pools.get(one.fields["pool"])
    found = pool.find(one.key) if pool is not None else None
    status = (
        found.state if found is not None else {"requested": "pending", "done": "completed"}.get(one.state, "failed")
    )
    steps = found.engines if found is not None else {}

    def at(*wanted: str) -> list[str]:
        return [name for name, step in steps.items() if step in wanted]

    shared = {
        "request_id": one.id, "status": "FAILED" if status == "refused" else status.upper(), "model_name": one.fields["pool"],
        "num_replicas": one.fields.get("target", 0), "engine_urls": [*filter(None, one.fields.get("address", "").split(","))],
        "failed_engines": at("failed"), "timeout_secs": one.fields.get("timeout_s", 0.0),
        "created_at": one.requested_at, "updated_at": one.changed_at,
        "error_message": one.detail if one.state == "failed" else "",
    }  # fmt: skip
    if _way(one, pools) == "scale_in":
        return {**shared, "selected_engines": list(steps), "removed_engines": at("completed")}
    return {**shared, "engine_ids": at("active")}


def _cancellation(one: ControlOperation, pools: Mapping[str, PoolScaling], key: str) -> ScaleRequest:
    """Return the request that cancels an operation. Raises Refused if its pool has not begun it."""
    found = pools[one.fields["pool"]].find(one.key) if one.fields["pool"] in pools else None
    if found is None:
        raise Refused(409, "request_id", f"{one.id!r}, which the run has not begun", "ask again in a second")
    return ScaleRequest(key, found.pool, cancel=found.id)


def _asked(api: RunControl) -> list[ControlOperation]:
    """Return the operations that ask for a number of engines, or for named ones, newest first."""
    api.settle()
    scales = (one for one in reversed(api.book.operations.values()) if one.action == "scale")
    return [one for one in scales if {"target", "address", "engine"} & one.fields.keys()]


def _find(api: RunControl, way: Way, wanted: str, pools: Mapping[str, PoolScaling]) -> ControlOperation:
    found = next((one for one in _asked(api) if one.id == wanted and _way(one, pools) == way), None)
    if found is None:
        raise Refused(404, "request_id", repr(wanted), f"GET /rollout/{way} lists the requests that this run remembers")
    return found


def _way(one: ControlOperation, pools: Mapping[str, PoolScaling]) -> Way:
    """Return the way of an operation: in if engines leave, or fewer engines were asked for than there were."""
    if "target" not in one.fields:
        return "scale_in" if "engine" in one.fields else "scale_out"
    pool = pools.get(one.fields["pool"])
    if pool is None:
        return "scale_out"
    found = pool.find(one.key)
    return "scale_in" if one.fields["target"] < (found.before if found else len(pool.engines)) else "scale_out"


def _pool(model_name: str) -> str:
    return "rollout" if model_name == DEFAULT else model_name
