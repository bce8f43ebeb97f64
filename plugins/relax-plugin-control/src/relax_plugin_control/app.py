# SPDX-License-Identifier: Apache-2.0
"""The application of the control API: routes over the run directory of one run, for callers with the token.

It reads the run's files and asks the run's process through the files that `relax stop` also uses, so it cannot hold up or
harm the run. Answers are JSON; `/events` is a stream of server-sent events.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import html
import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from relax_core.api.errors import ConfigError, RelaxError
from relax_core.api.http_requests import parse_json
from relax_core.api.run_commands import Command, Profile, ScaleRequest, named_command
from relax_core.runs import (
    ACTIONS,
    ANSWERS,
    EVENTS,
    Book,
    LineFollower,
    PlainAction,
    Refused,
    RunControl,
    RunView,
    encode,
    expected,
    health,
    log_filter,
    read_document,
    scale_plan,
    write_document,
)
from relax_plugin_control import metrics_service, rednote
from relax_plugin_control.log_stream import MAX_RECORDS, log_lines

BOOK = "operations"
MAX_BODY = 1 << 16
"""Bytes of a request's body, which is a JSON object with the route's fields."""
MAX_CALLS, MAX_STREAMS = 64, 64
"""Requests with the token at the same time, and event and log streams among them; more get status 503."""
BODY_S = 30.0
"""Seconds in which a request's body must arrive."""
MAX_LENGTH = 15
"""Most digits of a number in a query or header."""
MAX_ROWS = 1000
"""Steps in one answer of `/metrics`."""
POLL_S, QUIET_S = 0.5, 15.0
"""Seconds between two looks at the run's files, and between two comments of a silent event stream."""


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One route of the API, as served and as described in `/openapi.json`."""

    method: str
    path: str
    summary: str
    answer: Callable[[RunApi, Request], Response]
    query: Mapping[str, tuple[type, str]]
    """Name of a parameter in the query -> its type and meaning; a list is given by repeating the parameter."""
    fields: Mapping[str, tuple[type, str]] = field(default_factory=dict)
    """Name of a field of the body -> its type and meaning."""


class RunApi(RunControl):
    """The API of one run, which keeps its book in the run directory."""

    def __init__(self, view: RunView, token: str) -> None:
        self._token, self._file, self.calls, self.streams = token, view.path / f"{BOOK}.json", 0, 0
        super().__init__(view, Book.of(read_document(self._file) or {}))

    def allows(self, request: Request) -> bool:
        """Return True if the request has the token."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token.encode())

    def operations(self) -> list[dict[str, Any]]:
        """Return the operations as JSON data, newest first."""
        with self._lock:
            self.settle()
            return [asdict(one) for one in reversed(self.book.operations.values())]

    def keep(self) -> None:
        write_document(self._file, "relax.operations/1", self.book.plain())


def _answer(what: str) -> Callable[[RunApi, Request], Response]:
    return lambda api, _: _json(ANSWERS[what](api.view, time.time()))


def _metrics(api: RunApi, request: Request) -> Response:
    after = _number(request, "after", -1)
    rows = [row for row in api.view.metrics() if row["step"] > after]
    return _json(
        {
            "schema": "relax.metrics-page/1",
            "run": api.view.name,
            "metrics": rows[:MAX_ROWS],
            "more": len(rows) > MAX_ROWS,
        }
    )


def _events(api: RunApi, request: Request) -> Response:
    after = _number(request, "after", 0)
    if "last-event-id" in request.headers:
        after = _whole("last-event-id", request.headers["last-event-id"], after)
    stream = _event_stream(api, after)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _event_stream(api: RunApi, after: int) -> AsyncIterator[str]:
    """Yield the records of `events.jsonl` after that number, until the run has ended and all are sent."""
    file, number, silent = LineFollower(api.view.path / EVENTS), 0, 0.0
    while True:
        ended = await asyncio.to_thread(lambda: health(api.view, time.time()).ended)
        for record in await asyncio.to_thread(file.added):
            number += 1
            if number > after:
                silent = 0.0
                yield f"id: {number}\nevent: {record['event']}\ndata: {encode(record)}\n\n"
        if ended:
            yield f"id: {number}\nevent: end\ndata: {{}}\n\n"
            return
        if silent >= QUIET_S:
            silent = 0.0
            yield ": nothing new\n\n"
        await asyncio.sleep(POLL_S)
        silent += POLL_S


def _logs(api: RunApi, request: Request) -> Response:
    query = request.query_params
    step, last = _number(request, "step", -1), _number(request, "last", MAX_RECORDS)
    if last > MAX_RECORDS:
        raise Refused(400, "last", f"{last}", f"give a number up to {MAX_RECORDS}")
    level, since = query.get("level") or "debug", query.get("since") or ""
    try:
        wanted = log_filter(query.getlist("role"), level, since, None if step < 0 else step, time.time())
    except ConfigError as error:
        raise Refused(400, error.field.removeprefix("--"), str(error.got), error.fix) from error
    lines = log_lines(api.view, wanted, last, followed=bool(_number(request, "follow", 0)))
    return StreamingResponse(lines, media_type="application/x-ndjson", headers={"cache-control": "no-cache"})


def _operations(api: RunApi, _: Request) -> Response:
    return _json({"schema": "relax.operation-list/1", "run": api.view.name, "operations": api.operations()})


def _operation(api: RunApi, request: Request) -> Response:
    wanted = request.path_params["id"]
    found = next((one for one in api.operations() if one["id"] == wanted), None)
    if found is None:
        return _error(404, "operation", repr(wanted), "GET /operations lists the operations that this run remembers")
    return _json({"schema": "relax.operation/1", **found})


def _send(api: RunApi, command: Command, key: str) -> Response:
    operation, asks = api.ask(command, key)
    return _json({"schema": "relax.operation/1", **asdict(operation)}, 202 if asks else 200)


def _change(action: PlainAction) -> Callable[[RunApi, Request], Response]:
    return lambda api, request: _send(api, named_command(action), request.headers.get("idempotency-key", ""))


def _profile(api: RunApi, request: Request) -> Response:
    return _send(api, Profile(request.state.fields.get("steps", 1)), request.headers.get("idempotency-key", ""))


def _scale(api: RunApi, request: Request) -> Response:
    fields = dict(request.state.fields)
    if "target" not in fields:
        raise Refused(400, "target", "nothing", "give the number of engines that the pool is to have")
    return _ask_to_scale(api, request, {"pool": "rollout", **fields})


def _join(api: RunApi, request: Request) -> Response:
    fields = dict(request.state.fields)
    if "address" not in fields:
        raise Refused(400, "address", "nothing", "give HOST:PORT of the engine that is to join")
    return _ask_to_scale(api, request, {**fields, "pool": "rollout"})


def _drain(api: RunApi, request: Request) -> Response:
    engine, key = request.path_params["id"], request.headers.get("idempotency-key", "")
    own = [name for name, one in api.facts().pools.items() if engine in one.engines]
    asked = [one.fields["pool"] for one in api.book.operations.values() if one.key == key and one.action == "scale"]
    own = own or asked  # a repeated request gets its operation also when the engine has left
    if not own:
        return _error(404, "engine", engine, "GET /engines lists the engines of the run")
    return _ask_to_scale(api, request, {**request.state.fields, "pool": own[0], "engine": engine})


def _drain_node(api: RunApi, request: Request) -> Response:
    fields = dict(request.state.fields)
    if "node" not in fields:
        raise Refused(400, "node", "nothing", "give the address of a node; GET /engines lists them")
    return _ask_to_scale(api, request, {**fields, "pool": ""})


def _cancel(api: RunApi, request: Request) -> Response:
    wanted, pools = request.path_params["id"], api.facts().pools
    asked = api.book.operations.get(wanted)
    for name, one in pools.items():
        found = one.operations.get(wanted) or (one.find(asked.key) if asked is not None else None)
        if found is not None:
            return _ask_to_scale(api, request, {**request.state.fields, "pool": name, "cancel": found.id})
    fix = "GET /engines lists the operations that can be cancelled"
    return _error(404, "operation", repr(wanted), fix)


def _ask_to_scale(api: RunApi, request: Request, fields: dict[str, Any]) -> Response:
    key = request.headers.get("idempotency-key", "")
    if fields.pop("dry_run", False):
        planned = ScaleRequest(key or "dry-run", **fields)
        return _json(scale_plan(api.view.name, expected(planned, api.facts(), time.time())))
    return _send(api, ScaleRequest(key, **fields), key)


def _rednote(way: rednote.Way) -> tuple[ApiRoute, ...]:
    """Return the routes of one way to scale, as scripts for rednote's Relax use them."""

    def ask(api: RunApi, request: Request) -> Response:
        return _json(rednote.scale(api, way, request.state.fields, request.headers.get("idempotency-key", "")))

    def listed(api: RunApi, request: Request) -> Response:
        query = request.query_params
        return _json(rednote.requests(api, way, query.get("model_name"), query.get("status")))

    def one(api: RunApi, request: Request) -> Response:
        return _json(rednote.request(api, way, request.path_params["id"]))

    fields = {
        "model_name": (str, "name of the pool; absent or default: rollout"),
        "num_replicas": (int, "number of engines that it is to have"), "dry_run": DRY_RUN,
        "engine_urls": (list, "addresses of engines of `relax engine serve` that are to join or leave"),
        "force": (bool, "no effect: the requests of an engine that leaves move at once"),
        "timeout_secs": (float, "seconds in which engines that join must serve, else they leave; no effect on a leave"),
    }  # fmt: skip
    return (
        ApiRoute("POST", f"/rollout/{way}", "As `relax scale`, for scripts of rednote's Relax.", ask, {}, fields),
        ApiRoute("GET", f"/rollout/{way}", "These requests, newest first; filters: model_name, status.", listed, {}),
        ApiRoute("GET", f"/rollout/{way}/{{id}}", "One of them.", one, {}),
    )


def _cancel_scale_out(api: RunApi, request: Request) -> Response:
    return _json(rednote.cancel(api, request.path_params["id"], request.headers.get("idempotency-key", "")))


def _cancel_scale_outs(api: RunApi, request: Request) -> Response:
    return _json(rednote.cancel_all(api, request.state.fields))


def _rednote_evaluate(api: RunApi, request: Request) -> Response:
    step = request.state.fields.get("train_step", _number(request, "train_step", 0))
    return _json(rednote.evaluate(api, step, request.headers.get("idempotency-key", "")))


def _is_eval_done(api: RunApi, _: Request) -> Response:
    return _json(rednote.is_eval_done(api))


def _logs_of_programs(
    answer: Callable[[RunApi, Mapping[str, Any]], dict[str, Any]],
) -> Callable[[RunApi, Request], Response]:
    return lambda api, request: _json(answer(api, request.state.fields))


def _query_metrics(api: RunApi, request: Request) -> Response:
    step = _number(request, "step", -1)
    return _json(metrics_service.query_metrics(api.view, None if step < 0 else step))


def _metrics_health(api: RunApi, _: Request) -> Response:
    return _json(metrics_service.service_health(api.view))


def _rednote_engines(api: RunApi, _: Request) -> Response:
    return _json(rednote.engines(ANSWERS["engines"](api.view, time.time())["engines"]))


def _fields(path: ApiRoute, body: bytes) -> dict[str, Any]:
    """Return the fields of a body. Raises Refused for anything else than a JSON object with the route's fields."""
    if not path.fields:
        if body not in (b"", b"{}"):
            got = repr(body[:40].decode(errors="replace"))
            raise Refused(400, "body", got, f"send no body or {{}}: {path.path} has no fields")
        return {}
    got = repr(body[:40].decode(errors="replace"))
    try:
        found = parse_json(body or b"{}")
    except ValueError as error:
        raise Refused(400, "body", f"{got} ({error})", "send a JSON object") from error
    if not isinstance(found, dict):
        raise Refused(400, "body", got, "send a JSON object")
    for name, value in found.items():
        if name not in path.fields:
            raise Refused(400, name[:40], "a field that the route has not", f"it has {', '.join(path.fields)}")
        kind = path.fields[name][0]
        if value is not None and type(value) is not kind and (kind, type(value)) != (float, int):
            raise Refused(400, name, repr(value)[:40], f"give a value of type {kind.__name__}")
    return {name: value for name, value in found.items() if value is not None}


CHANGES: Mapping[PlainAction, str] = {
    "pause": "Hold the run before its next step, until it is continued.",
    "continue": "Continue a run that a guard or a user has paused.",
    "stop": "Save a checkpoint and end the run.",
    "checkpoint": "Save a checkpoint after the current step.",
    "evaluate": "Evaluate the newest weights once on every set of [eval].",
}
STREAMS = ("/events", "/logs")
"""Paths of the routes whose answers are streams."""
KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
"""JSON's name of a parameter's type."""
DRY_RUN = (bool, "true: answer which engines would join or leave, and change nothing")
LOGGED = {
    "step": (int, "step over all stages, 0: before the first; absent: the step that is trained now"),
    "tags": (dict, "no effect, as there"),
}  # fmt: skip
METRICS_SERVICE = (
    ApiRoute(
        "POST", "/metrics/log_metric", "Log one value into the run's metrics and sinks.",
        _logs_of_programs(metrics_service.log_metric), {},
        {**LOGGED, "metric_name": (str, "recorded as user/NAME"), "metric_value": (float, "a finite number")},
    ),
    ApiRoute(
        "POST", "/metrics/log_metrics_batch", "Log several values of a step.",
        _logs_of_programs(metrics_service.log_metrics_batch), {},
        {**LOGGED, "metrics": (dict, "names, which are recorded as user/NAME, with finite numbers")},
    ),
    ApiRoute(
        "POST", "/metrics/report_step", "Answer whether the values of a step are recorded.",
        _logs_of_programs(metrics_service.report_step), {}, {"step": (int, "the step")},
    ),
    ApiRoute(
        "POST", "/metrics/clear_metrics", "Forget values of steps that have not finished.",
        _logs_of_programs(metrics_service.clear_metrics), {}, {"step": (int, "only of this step")},
    ),
    ApiRoute(
        "POST", "/metrics/log_error", "Record an error in the run's log.", _logs_of_programs(metrics_service.log_error), {},
        {"error_message": (str, "cut after 2,000 characters"), "error_traceback": (str, "cut after 16,000 characters")},
    ),
    ApiRoute(
        "GET", "/metrics/query_metrics", "Recorded metrics of one step.", _query_metrics,
        {"step": (int, "absent: the newest step")},
    ),
    ApiRoute("GET", "/metrics/health", "Whether the run records what programs log, and its sinks.", _metrics_health, {}),
)  # fmt: skip
"""The metrics service of rednote's Relax."""
PATHS = (
    ApiRoute("GET", "/status", "The run's progress, reward and roles, as `relax status --json`.", _answer("status"), {}),
    ApiRoute("GET", "/why", "What the run waits for, and which role must act, as `relax why --json`.", _answer("why"), {}),
    ApiRoute("GET", "/engines", "The engines of every pool, with their versions and loads.", _answer("engines"), {}),
    ApiRoute(
        "GET", "/metrics", "Metrics by step.", _metrics,
        {"after": (int, f"only later steps; at most {MAX_ROWS} come at once")},
    ),
    ApiRoute(
        "GET", "/events", "The run's events as server-sent events. The header Last-Event-ID continues a stream.", _events,
        {"after": (int, "number of the last event that the caller has")},
    ),
    ApiRoute(
        "GET", "/logs", "The run's log as lines of JSON, as `relax logs --json`; the last line has remarks.", _logs,
        {"role": (list, "only this role or process"), "level": (str, "lowest level; absent: debug"),
         "since": (str, "earliest record: an age such as 10m, or a time in UTC"), "step": (int, "only records of this step"),
         "last": (int, f"only the last records so far; absent, and at most: {MAX_RECORDS}"),
         "follow": (int, "1: send further records until the run ends")},
    ),
    ApiRoute("GET", "/operations", "The changes that were asked of this run, newest first.", _operations, {}),
    ApiRoute("GET", "/operations/{id}", "One of these changes: requested, done or failed.", _operation, {}),
    *(ApiRoute("POST", f"/{action}", CHANGES[action], _change(action), {}) for action in ACTIONS),
    ApiRoute(
        "POST", "/profile", "Record profiles of the next steps, as `relax profile`.", _profile, {},
        {"steps": (int, "number of steps; absent: 1")},
    ),
    ApiRoute(
        "POST", "/engines", "Change the number of a pool's engines, as `relax scale`.", _scale, {},
        {"pool": (str, "name of the pool; absent: rollout"), "target": (int, "number of engines that it is to have"),
         "keep_partial": (bool, "true: keep engines that joined if another one can't"), "dry_run": DRY_RUN},
    ),
    ApiRoute(
        "POST", "/engines/join", "Let an engine join that was started elsewhere, by `relax engine serve`.", _join, {},
        {"address": (str, "HOST:PORT of the engine, which the run's configuration must list"), "dry_run": DRY_RUN},
    ),
    ApiRoute("POST", "/engines/{id}/drain", "Let this engine leave its pool.", _drain, {}, {"dry_run": DRY_RUN}),
    ApiRoute(
        "POST", "/engines/drain", "Let all engines of a node leave their pools, except protected ones.", _drain_node, {},
        {"node": (str, "address of the node, as GET /engines shows it"), "dry_run": DRY_RUN},
    ),
    ApiRoute("POST", "/operations/{id}/cancel", "Undo an open operation that scales.", _cancel, {}, {"dry_run": DRY_RUN}),
    *_rednote("scale_out"),
    ApiRoute("POST", "/rollout/scale_out/{id}/cancel", "Undo this request if it is open.", _cancel_scale_out, {}),
    ApiRoute(
        "POST", "/rollout/scale_out_cancel", "Undo all open requests to scale out.", _cancel_scale_outs, {},
        {"model_name": (str, "only those of this pool"), "dry_run": (bool, "true: only answer which would be undone"),
         "status_filter": (str, "only those in this state, such as WEIGHT_SYNCING")},
    ),
    *_rednote("scale_in"),
    ApiRoute("GET", "/rollout/engines", "The engines, as rednote's Relax answers.", _rednote_engines, {}),
    ApiRoute(
        "POST", "/rollout/evaluate", "Evaluate the newest weights, unless an evaluation is open.", _rednote_evaluate,
        {"train_step": (int, "comes back as rollout_id, without another effect")},
        {"train_step": (int, "as in the query")},
    ),
    ApiRoute("GET", "/rollout/is_eval_done", "Whether the evaluation asked for here has ended.", _is_eval_done, {}),
    *METRICS_SERVICE,
)  # fmt: skip


def make_app(api: RunApi) -> Starlette:
    """Return the application; everything except `/docs` and `/openapi.json` requires the token."""

    def route(path: ApiRoute) -> Route:
        async def serve(request: Request) -> Response:
            if not api.allows(request):
                answer = _error(
                    401, "authorization", "no or another token", "send the header Authorization: Bearer TOKEN"
                )
                answer.headers["www-authenticate"] = "Bearer"
                return answer
            if api.calls >= MAX_CALLS or (api.streams >= MAX_STREAMS and path.path in STREAMS):
                got = f"{api.calls} calls and {api.streams} streams at once"
                return _error(503, "calls", got, f"end some: at most {MAX_CALLS} and {MAX_STREAMS} are served")
            api.calls += 1
            try:
                answer = await answered(request)
            finally:
                api.calls -= 1
            if isinstance(answer, StreamingResponse):
                answer.body_iterator = counted(answer.body_iterator)
            return answer

        async def answered(request: Request) -> Response:
            length = request.headers.get("content-length", "0")
            if "transfer-encoding" in request.headers or len(length) > MAX_LENGTH or int(length) > MAX_BODY:
                return _error(413, "body", "a body that is too long or has no length", f"send at most {MAX_BODY} bytes")
            if path.method == "POST":
                try:
                    async with asyncio.timeout(BODY_S):
                        body = (await request.body()).strip()
                except TimeoutError:
                    return _error(408, "body", f"no whole body within {BODY_S:.0f} s", "send the request again")
            try:
                request.state.fields = _fields(path, body) if path.method == "POST" else {}
                return await asyncio.to_thread(path.answer, api, request)
            except ConfigError as error:
                status = error.status if isinstance(error, Refused) else 500
                return _error(status, error.field, str(error.got), error.fix)
            except RelaxError as error:
                return _error(500, "run", str(error), "see `relax status`")

        return Route(path.path, serve, methods=[path.method])

    async def counted(parts: AsyncIterable[Any]) -> AsyncIterator[Any]:
        api.streams += 1
        try:
            async for part in parts:
                yield part
        finally:
            api.streams -= 1

    async def settle_for_ever() -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await asyncio.to_thread(api.settle)
            except RelaxError:
                continue  # a full disk or a file system that is away: the next look tries again

    async def described(_: Request) -> Response:
        return JSONResponse(openapi())

    async def page(_: Request) -> Response:
        return HTMLResponse(docs_page())

    async def refused(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        allowed = sorted(path.method for path in PATHS if path.path == request.url.path)
        fix = f"use {' or '.join(allowed)}; a GET changes nothing" if allowed else "GET /docs lists the routes"
        fix = rednote.INSTEAD.get(request.url.path, fix)
        return _error(status, "route", f"{request.method} {request.url.path}", fix)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        following = asyncio.create_task(settle_for_ever())
        yield
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    return Starlette(
        routes=[*map(route, PATHS), Route("/openapi.json", described), Route("/docs", page)],
        exception_handlers={HTTPException: refused}, lifespan=lifespan,
    )  # fmt: skip


def openapi() -> dict[str, Any]:
    """Describe the routes as an OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for path in PATHS:
        parameters: list[dict[str, Any]] = [
            {"name": name, "in": "query", "description": means, "schema": {"type": KINDS[kind]}}
            for name, (kind, means) in path.query.items()
        ]
        if "{id}" in path.path:
            parameters.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string"}})
        codes: tuple[str, ...] = ("200", "401")
        if path.method == "POST":
            parameters.append({
                "name": "Idempotency-Key", "in": "header", "required": True, "schema": {"type": "string"},
                "description": "new for each change; a repeated request with the same key is done once",
            })  # fmt: skip
            codes = ("202", "200", "400", "401", "409")
        described: dict[str, Any] = {
            "summary": path.summary, "parameters": parameters,
            "responses": {code: {"description": HTTPStatus(int(code)).phrase} for code in codes},
        }  # fmt: skip
        if path.fields:
            properties = {
                name: {"type": KINDS[kind], "description": means} for name, (kind, means) in path.fields.items()
            }
            schema = {"type": "object", "properties": properties, "additionalProperties": False}
            described["requestBody"] = {"content": {"application/json": {"schema": schema}}}
        paths.setdefault(path.path, {})[path.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Relax: control API of a run", "version": version("relax-core")},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}],
        "paths": paths,
    }


def docs_page() -> str:
    """Return a page that lists the routes; it loads nothing from elsewhere."""
    rows = "".join(
        f"<tr><td><code>{path.method} {html.escape(path.path)}</code></td><td>{html.escape(path.summary)}"
        + "".join(f"<br><code>?{name}=</code> {html.escape(means)}" for name, (_, means) in path.query.items())
        + "".join(f"<br><code>{name}</code> {html.escape(means)}" for name, (_, means) in path.fields.items())
        + "</td></tr>"
        for path in PATHS
    )
    return (
        "<!doctype html><meta charset=utf-8><title>Relax: control API</title>"
        "<style>body{font:16px sans-serif;max-width:60rem;margin:2rem auto}td{padding:.3rem 1rem;vertical-align:top}</style>"
        "<h1>Control API of a run</h1><p>Send <code>Authorization: Bearer TOKEN</code>, and with every POST an "
        "<code>Idempotency-Key</code>. <a href=openapi.json>openapi.json</a></p><table>"
        f"{rows}</table>"
    )


def _number(request: Request, name: str, default: int) -> int:
    return _whole(name, request.query_params.get(name, ""), default)


def _whole(name: str, given: str, default: int) -> int:
    """Return a whole number; the default for an empty text. Raises Refused, also for more than MAX_LENGTH digits."""
    if not given:
        return default
    if not given.isdecimal() or len(given) > MAX_LENGTH:
        raise Refused(400, name, repr(given[:40]), f"give a whole number from 0 of at most {MAX_LENGTH} digits")
    return int(given)


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(encode(body), status, media_type="application/json")


def _error(status: int, field: str, got: str, fix: str) -> Response:
    body = {"schema": "relax.error/1", "error": f"{field}: got {got}; {fix}", "field": field, "got": got, "fix": fix}
    return Response(json.dumps(body), status, media_type="application/json")
