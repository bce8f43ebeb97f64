# SPDX-License-Identifier: Apache-2.0
"""Data of the API between processes: in another interpreter, and every type as it went."""

from __future__ import annotations

import dataclasses
import enum
import subprocess
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings

from relax_core.api import Action, Delta, GenerateRequest, LogMetrics, Media
from relax_core.api.events import Span
from relax_core.api.task import Message, ToolCall
from relax_core.api.trajectory import Node, Trajectory
from relax_core.rpc import messages

OTHER_SIDE = """
import sys
from relax_core.api import Delta
from relax_core.rpc import messages
requests = messages.decode(sys.stdin.buffer.read())
deltas = tuple(Delta(r.id, (7,), (-0.5,), 3, 2, "length", routed_experts=b"\\x01\\x02") for r in requests)
heavy = tuple(name for name in ("torch", "ray", "pydantic", "jinja2") if name in sys.modules)
sys.stdout.buffer.write(messages.encode((deltas, heavy)))
"""


def test_another_interpreter_speaks_the_protocol_with_none_of_the_drivers_packages() -> None:
    requests = (GenerateRequest("a", (1, 2), 4, stop_tokens=(0,), media=("key#t=0.0,1.5",)),)
    answer = subprocess.run(
        [sys.executable, "-c", OTHER_SIDE],
        input=messages.encode(requests),
        capture_output=True,
        check=True,
        timeout=600,
    )
    deltas, heavy = messages.decode(answer.stdout)
    assert deltas == (Delta("a", (7,), (-0.5,), 3, 2, "length", routed_experts=b"\x01\x02"),)
    assert heavy == ()


def travelling() -> list[type]:
    messages.encode(None)
    return [cls for name, cls in sorted(messages._registry.items()) if cls.__module__.startswith("relax_core.api.")]


@pytest.mark.parametrize("cls", travelling(), ids=lambda cls: cls.__name__)
def test_every_data_type_of_the_api_comes_back_as_it_went(cls: type) -> None:
    value = example(cls)
    back = messages.decode(messages.encode(value))
    assert type(back) is cls
    assert plain(back) == plain(value)


def test_arrays_in_the_arguments_of_a_call_are_lists_in_every_process() -> None:
    call = ToolCall("zoom", {"box": [1, [2, 3]], "more": {"of": []}})
    action = messages.decode(messages.encode(Action("", (), (call,))))
    assert action.tool_calls == (call,)
    assert action.tool_calls[0].arguments["box"] == [1, [2, 3]]
    assert ToolCall("zoom", {"box": (1, (2,))}).arguments == {"box": [1, [2]]}


def test_two_views_of_a_video_have_references_of_their_own() -> None:
    views = [Media("video", "clip.mp4", "k1", (0.0, 3.0)), Media("video", "clip.mp4", "k1", (5.0, 9.0))]
    assert [view.reference for view in views] == ["k1#t=0.0,3.0", "k1#t=5.0,9.0"]


ids = st.lists(st.integers(-(2**70), 2**70), max_size=3).map(tuple)
node = st.builds(
    Node, st.none() | st.integers(0, 3), ids, st.booleans(), media=st.lists(st.text(), max_size=2).map(tuple)
)
said = st.builds(
    Message, st.text(max_size=2), st.text(max_size=3), st.sampled_from(((), (ToolCall("f", {"a": [1]}),))),
    extra=st.dictionaries(st.text(max_size=2), st.lists(st.integers(), max_size=2), max_size=2),
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_samples_that_share_parts_arrive_as_they_went(data: st.DataObject) -> None:
    nodes = data.draw(st.lists(node, min_size=1, max_size=2))
    texts = data.draw(st.lists(said, min_size=1, max_size=2))
    samples = tuple(
        Trajectory(
            tuple(data.draw(st.lists(st.sampled_from(texts) | said, max_size=3))), "é",
            tuple(data.draw(st.lists(st.sampled_from(nodes) | node, max_size=3))),
            info=data.draw(st.dictionaries(st.text(max_size=2), st.just([1]) | ids | st.just(texts[0]), max_size=2)),
        )
        for _ in range(data.draw(st.integers(2, 5)))
    )  # fmt: skip
    back = messages.decode(messages.encode(samples))
    assert back == samples
    assert [list(map(type, one.info.values())) for one in back] == [
        list(map(type, one.info.values())) for one in samples
    ]


def test_a_prompt_that_requests_share_is_sent_once() -> None:
    prompt = tuple(range(1000, 3000))
    requests = tuple(GenerateRequest(str(number), prompt, 4, stop_tokens=(0,)) for number in range(64))
    body = messages.encode(requests)
    back = messages.decode(body)
    assert back == requests and len({id(one.tokens) for one in back}) == 1
    assert len(body) < len(messages.encode(requests[:1])) + 64 * 40


@pytest.mark.parametrize(
    ("code", "held", "error"),
    [(11, [[1, 2, 3], [1, 1]], ValueError), (11, [[1], [2, -1]], ValueError), (12, [["a"], [0, 1]], IndexError)],
)
def test_a_column_whose_places_do_not_fit_is_refused(code: int, held: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        messages.decode(msgpack.packb(msgpack.ExtType(code, msgpack.packb(held))))


def example(kind: Any, inside: tuple[Any, ...] = ()) -> Any:
    """Some value of an annotated type, every optional field filled; what holds others of its own type holds none."""
    if kind is LogMetrics:
        return LogMetrics({"user/x": 0.25}, 3)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return arguments[-1]
    if origin in (typing.Union, types.UnionType):
        return example(next(argument for argument in arguments if argument is not type(None)), inside)
    if origin is tuple:
        return tuple(example(one, inside) for one in arguments if one is not Ellipsis and one not in inside)
    if origin is frozenset:
        return frozenset({example(arguments[0], inside)})
    if origin is not None and issubclass(origin, Mapping):
        return {example(arguments[0], inside): example(arguments[1], inside)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return list(kind)[-1]
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else kind._fields
        hints = typing.get_type_hints(kind, localns={"np": np, "Span": Span})
        return kind(**{name: example(hints[name], (*inside, kind)) for name in names})
    simple: dict[Any, Any] = {
        int: 2**40, float: 0.25, str: "é", bool: True, bytes: b"\xff", np.ndarray: np.arange(3, dtype=np.uint16), Any: (1, "a"),
    }  # fmt: skip
    return simple[kind]


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return tuple(map(plain, value)) if isinstance(value, tuple) else value
