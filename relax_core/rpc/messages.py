# SPDX-License-Identifier: Apache-2.0
"""The wire format between processes: msgpack of plain data, numpy arrays and the dataclasses of `api`.

Whatever a field of a registered type holds arrives as it was, lists as lists and tuples as tuples, however deep in
mappings. Sequences that are no field, such as a call's arguments, arrive as tuples; `PlainData` keeps those.
Decoding builds only registered types, so nothing that arrives can run code. Both sides state `PROTOCOL` at the
first call and refuse another. Pickle is never used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import msgpack

PROTOCOL = 5
LARGE_BYTES = 1 << 14
"""From here on an array travels beside its message, where the carrier takes arrays."""
MAX_LARGE = 4096
"""So many of one message; the others travel within it."""
MAX_DEPTH = 64
"""Values within values; each is a message within the message, whose decoding takes some of the C stack."""
KEPT_BYTES = 1 << 20
"""A buffer that a larger message has made is not kept."""

_TYPE, _ARRAY, _SET, _BIG, _TABLE, _LARGE, _OBJECTS, _PACKED, _EXACT, _TUPLE = range(1, 11)
_FLAT = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of values that msgpack tells by itself."""
_registry: dict[str, Any] = {}
_fields: dict[type, tuple[str, ...]] = {}
"""Attributes that a value is made of again, of every registered type but those of `_packed`."""
_packed: set[type] = set()
T = TypeVar("T", bound=type)


def register(cls: T) -> T:
    """Let a dataclass, named tuple or enum travel, or a class with `pack` and `unpack`; a decorator.

    Names are unique by class name. `pack(self)` gives plain data, of which the class method `unpack` makes the value again.
    """
    known = _registry.setdefault(cls.__name__, cls)
    if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"wire type {cls.__name__}: {known.__module__} and {cls.__module__} both register it")
    _registry[cls.__name__] = cls
    if hasattr(cls, "unpack"):
        _packed.add(cls)
    elif dataclasses.is_dataclass(cls):
        _fields[cls] = tuple(field.name for field in dataclasses.fields(cls))
    elif issubclass(cls, Enum):
        _fields[cls] = ("value",)
    else:
        _fields[cls] = cls._fields  # type: ignore[attr-defined]
    return cls


@register
@dataclasses.dataclass(frozen=True, slots=True)
class PlainData:
    """Holds data that is no field of its own, so that its lists arrive as lists."""

    value: Any


def encode(value: Any, large: list[Any] | None = None) -> bytes:
    """Return plain data, arrays and registered types as bytes; TypeError names what can't travel.

    Large arrays are not copied where a list is given: they are appended to it, as bytes, and must travel beside the message.
    """
    _register_api()
    if type(value) is list and _alike(value):
        value = _table(value, large)
    return _encoded(_field(value, large) if type(value) is dict else value, large)


def _encoded(value: Any, large: list[Any] | None, exact: bool = False) -> bytes:
    try:
        encoder = _idle.pop()
    except IndexError:
        encoder = _Encoder()
    encoder.large, encoder.exact = large, exact
    body = encoder.pack(value)
    encoder.large = None
    if len(body) <= KEPT_BYTES:
        _idle.append(encoder)
    return body


def decode(data: bytes | memoryview, large: Sequence[Any] = (), depth: int = 0) -> Any:
    """Return the value; sequences that are no field of a type come back as tuples. ValueError for an unknown type."""
    return _decoded(data, large, depth, exact=False)


def _decoded(data: bytes | memoryview, large: Sequence[Any], depth: int, exact: bool) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"wire: values are nested in more than {MAX_DEPTH} others")
    _register_api()
    hook = partial(_decode, large, depth + 1)
    return msgpack.unpackb(data, ext_hook=hook, use_list=exact, strict_map_key=False, raw=False)


def decode_hello(data: bytes | memoryview) -> tuple[int, str]:
    """Return protocol and token of a first frame. No type is built for a stranger; ValueError for anything else."""
    found = msgpack.unpackb(data, use_list=False, raw=False)
    match found:
        case (int(protocol), str(token)):
            return protocol, token
    raise ValueError("wire: the first frame is not a protocol and a token")


class _Encoder:
    """A packer of one message at a time, kept for the next one: making its buffer costs more than a small message."""

    __slots__ = ("exact", "large", "pack")

    def __init__(self) -> None:
        self.large: list[Any] | None = None
        self.exact = False
        """Lists are told from tuples."""
        packer = msgpack.Packer(default=self._encode, strict_types=True, use_bin_type=True, buf_size=1 << 12)
        self.pack: Callable[[Any], bytes] = packer.pack

    def _encode(self, value: Any) -> Any:
        """Turn what msgpack does not know into what it knows."""
        cls, large = type(value), self.large
        if cls is tuple:  # the most frequent
            if self.exact:
                return msgpack.ExtType(_TUPLE, _encoded(list(value), large, True))
            return _table(value, large) if _alike(value) else list(value)
        if cls in _fields:
            plain = [_field(getattr(value, name), large) for name in _fields[cls]]
            return msgpack.ExtType(_TYPE, encode([cls.__name__, plain], large))
        if cls in _packed:
            return msgpack.ExtType(_PACKED, encode([cls.__name__, value.pack()], large))
        if isinstance(value, tuple) and not hasattr(cls, "_fields"):
            return self._encode(tuple(value))
        if isinstance(value, (set, frozenset)):
            return msgpack.ExtType(_SET, encode(list(value)))
        if isinstance(value, dict) or hasattr(value, "keys"):
            return dict(value) if self.exact else _field(dict(value), large)
        if isinstance(value, int) and not isinstance(value, Enum):
            return msgpack.ExtType(_BIG, str(int(value)).encode())
        return _encode_array(large, value)


_idle: list[_Encoder] = []
"""Encoders that no message uses: a message within a message needs one of its own, and so does another thread."""


def _field(value: Any, large: list[Any] | None) -> Any:
    """Encode what a field holds, so far as msgpack alone would not tell it from something else."""
    kind = type(value)
    if kind is tuple:  # as a list: each that msgpack has to ask about is a call
        return list(value) if _FLAT.issuperset(map(type, value)) else [_field(each, large) for each in value]
    if kind is list or (kind is dict and not _FLAT.issuperset(map(type, value.values()))):
        return msgpack.ExtType(_EXACT, _encoded(value, large, True))
    return value


def _alike(values: Sequence[Any]) -> bool:
    """Tell whether they are several values of one registered type."""
    return len(values) > 1 and type(values[0]) in _fields and len(set(map(type, values))) == 1


def _table(values: Sequence[Any], large: list[Any] | None) -> Any:
    """Encode many values of one type by their fields: one by one, each would be a message within the message."""
    cls = type(values[0])
    names = _fields[cls]
    rows = map(attrgetter(*names), values)
    plain: list[Any] = []
    for column in zip(*rows, strict=True) if len(names) > 1 else [tuple(rows)]:
        kinds = set(map(type, column))
        if not kinds.isdisjoint((tuple, list, dict)):
            plain.append([_field(each, large) for each in column])
        else:
            plain.append(_table(column, large) if _alike(column) else list(column))
    return msgpack.ExtType(_TABLE, encode([cls.__name__, plain], large))


def _encode_array(large: list[Any] | None, value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        cls = type(value)
        raise TypeError(f"{cls.__module__}.{cls.__qualname__} can't travel; send plain data or an api type")
    if value.dtype == object:
        return msgpack.ExtType(_OBJECTS, encode([list(value.shape), value.ravel().tolist()]))
    array = np.ascontiguousarray(value)
    if large is None or array.nbytes < LARGE_BYTES or len(large) >= MAX_LARGE:
        return msgpack.ExtType(_ARRAY, encode((array.dtype.str, list(array.shape), array.tobytes())))
    large.append(array.reshape(-1).view(np.uint8))
    return msgpack.ExtType(_LARGE, encode((array.dtype.str, list(array.shape), len(large) - 1)))


def _decode(large: Sequence[Any], depth: int, code: int, data: bytes) -> Any:
    if code in (_ARRAY, _LARGE, _OBJECTS):
        return _decode_array(large, depth, code, data)
    if code == _EXACT:
        return _decoded(data, large, depth, exact=True)
    if code == _TUPLE:
        return tuple(_decoded(data, large, depth, exact=True))
    if code == _SET:
        return frozenset(decode(data, (), depth))
    if code == _BIG:
        return int(data)
    if code not in (_TYPE, _TABLE, _PACKED):
        raise ValueError(f"wire: unknown extension {code}; both sides must run the same relax-core")
    name, values = decode(data, large, depth)
    if name not in _registry:
        raise ValueError(f"wire: unknown type {name!r}; both sides must run the same relax-core")
    cls = _registry[name]
    if code == _PACKED:
        return cls.unpack(values)
    return cls(*values) if code == _TYPE else tuple(map(cls, *values))


def _decode_array(large: Sequence[Any], depth: int, code: int, data: bytes) -> Any:
    import numpy as np

    if code == _OBJECTS:
        shape, values = decode(data, (), depth)
        objects = np.empty(len(values), object)
        for place, held in enumerate(values):  # numpy would take tuples for rows
            objects[place] = held
        return objects.reshape(shape)
    dtype, shape, held = decode(data, (), depth)
    array = np.frombuffer(large[held] if code == _LARGE else held, dtype=np.dtype(dtype)).reshape(shape)
    array.flags.writeable = False
    return array


_pending: list[Callable[[], None]] = []


def _register_api() -> None:
    while _pending:
        _pending.pop()()


def _register_all() -> None:
    import importlib

    for module_name in (
        "batch", "bus", "component", "engine", "environment", "events", "plan", "reward", "role", "sandbox", "source", "task",
        "trainer", "trajectory", "weights",
    ):  # fmt: skip
        module = importlib.import_module(f"relax_core.api.{module_name}")
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__ and _travels(value):
                register(value)
    register(importlib.import_module("relax_core.api.algorithm").Source)  # all else of that module holds tensors


def _travels(cls: type) -> bool:
    return (
        dataclasses.is_dataclass(cls)
        or issubclass(cls, Enum)
        or (issubclass(cls, tuple) and (hasattr(cls, "_fields") or hasattr(cls, "unpack")))
    )


_pending.append(_register_all)
