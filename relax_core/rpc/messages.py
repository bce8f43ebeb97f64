# SPDX-License-Identifier: Apache-2.0
"""The wire format between processes: msgpack of plain data, numpy arrays and the dataclasses of `relax_core.api`.

Fields of registered types keep lists as lists and tuples as tuples, at any depth. Sequences outside of fields, such as
the arguments of a call, arrive as tuples; wrap them in `PlainData` to keep their lists. Decoding builds only registered
types, so received data can't run code. Both sides send `PROTOCOL` first and refuse a different number. Pickle is never
used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack

if TYPE_CHECKING:
    import numpy as np

PROTOCOL = 7
LARGE_BYTES = 1 << 14
"""Arrays of at least this size are sent after their message, if the transport supports that."""
MAX_LARGE = 4096
"""Largest number of arrays after one message. Further arrays are sent within the message."""
MAX_DEPTH = 64
"""Largest number of nested levels in a value. Each level is a message within a message and takes C stack to decode."""
KEPT_BYTES = 1 << 20
"""An encoder that made a larger message is discarded, to free its buffer."""

_TYPE, _ARRAY, _SET, _BIG, _TABLE, _LARGE, _OBJECTS, _PACKED, _EXACT, _TUPLE, _RAGGED, _SHARED = range(1, 13)
_FLAT = frozenset({str, int, float, bool, bytes, type(None)})
"""Types that msgpack encodes and decodes by itself."""
_registry: dict[str, Any] = {}
_names: dict[type, str] = {}
"""Name of each registered type on the wire, the key of the type in `_registry`."""
_fields: dict[type, tuple[str, ...]] = {}
"""For each registered type that is not in `_packed`: the attributes that are sent and passed to its constructor."""
_packed: set[type] = set()
"""Registered types with `pack` and `unpack`."""
_STAYING = frozenset({"Check", "Component", "Kind", "RunOpened", "Table", "WorkAtEnd"})
"""Types of the API that hold classes, functions or events of their process, and are not registered."""
T = TypeVar("T", bound=type)


def register(cls: T) -> T:
    """Register a type for the wire: a dataclass, named tuple, enum, or class with `pack` and `unpack`. A decorator.

    Class names of the core must be unique; a type of a plugin is sent with the name of its module. `pack(self)` returns
    plain data; the class method `unpack` makes the value from that data.
    """
    core = cls.__module__.startswith("relax_core.")
    name = _names[cls] = cls.__name__ if core else f"{cls.__module__}.{cls.__qualname__}"
    known = _registry.setdefault(name, cls)
    if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"wire type {name}: {known.__module__} and {cls.__module__} both register it")
    _registry[name] = cls
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
    """A wrapper for data outside of fields, so that its lists arrive as lists."""

    value: Any


def encode(value: Any, large: list[Any] | None = None) -> bytes:
    """Return plain data, arrays and registered types as bytes. Raises TypeError naming a type that can't be sent.

    Raises ValueError for a value that can't be sent, such as half of a surrogate pair. If `large` is given, large
    arrays are appended to it as bytes instead of copied, and must be sent after the message.
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
    try:
        body = encoder.pack(value)
    except UnicodeEncodeError as error:
        raise ValueError("wire: a text holds half of a surrogate pair, which is not a character") from error
    encoder.large = None
    if len(body) <= KEPT_BYTES:
        _idle.append(encoder)
    return body


def decode(data: bytes | memoryview, large: Sequence[Any] = (), depth: int = 0, exact: bool = False) -> Any:
    """Return a message's value. Raises ValueError for an unknown type.

    Sequences outside of fields become tuples; with `exact`, which fields use, they become lists.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"wire: values are nested in more than {MAX_DEPTH} levels")
    _register_api()
    hook = partial(_decode, large, depth + 1)
    return msgpack.unpackb(data, ext_hook=hook, use_list=exact, strict_map_key=False, raw=False)


def decode_hello(data: bytes | memoryview) -> tuple[int, str]:
    """Return protocol and token of a peer's first frame without building any registered type. Raises ValueError."""
    found = msgpack.unpackb(data, use_list=False, raw=False)
    match found:
        case (int(protocol), str(token)):
            return protocol, token
    raise ValueError("wire: the first frame must be a protocol number and a token")


class _Encoder:
    """A packer of one message at a time. It is reused, because making its buffer costs more than a small message."""

    __slots__ = ("exact", "large", "pack")

    def __init__(self) -> None:
        self.large: list[Any] | None = None
        self.exact = False
        """True while lists must stay distinct from tuples."""
        packer = msgpack.Packer(default=self._encode, strict_types=True, use_bin_type=True, buf_size=1 << 12)
        self.pack: Callable[[Any], bytes] = packer.pack

    def _encode(self, value: Any) -> object:
        """Turn a value that msgpack does not support into one that it supports."""
        cls, large = type(value), self.large
        if cls is tuple:  # the most frequent type
            if self.exact:
                return msgpack.ExtType(_TUPLE, _encoded(list(value), large, True))
            return _table(value, large) if _alike(value) else list(value)
        if cls in _fields:
            plain = [_field(getattr(value, name), large) for name in _fields[cls]]
            return msgpack.ExtType(_TYPE, encode([_names[cls], plain], large))
        if cls in _packed:
            return msgpack.ExtType(_PACKED, encode([_names[cls], value.pack()], large))
        if isinstance(value, tuple) and not hasattr(cls, "_fields"):
            return self._encode(tuple(value))
        if isinstance(value, (str, float)) and not isinstance(value, Enum):  # a subclass, whose own methods never run
            return str.__str__(value) if isinstance(value, str) else float.__float__(value)
        if isinstance(value, (set, frozenset)):
            return msgpack.ExtType(_SET, encode(list(value)))
        if isinstance(value, dict) or hasattr(value, "keys"):
            return dict(value) if self.exact else _field(dict(value), large)
        if isinstance(value, int) and not isinstance(value, Enum):
            return msgpack.ExtType(_BIG, str(int(value)).encode())
        return _encode_array(large, value)


_idle: list[_Encoder] = []
"""Encoders that are free to use. Each message within a message needs its own encoder, and so does each thread."""


def _field(value: Any, large: list[Any] | None) -> object:
    """Encode the value of a field where msgpack alone would lose the difference between list and tuple."""
    kind = type(value)
    if kind is tuple:  # as a list, which msgpack encodes without a call of `_encode`
        kinds = set(map(type, value))
        if kinds == {dict}:
            return msgpack.ExtType(_TUPLE, _encoded(list(value), large, True))
        return list(value) if kinds <= _FLAT else [_field(each, large) for each in value]
    if kind is list or (kind is dict and not _FLAT.issuperset(map(type, value.values()))):
        return msgpack.ExtType(_EXACT, _encoded(value, large, True))
    return value


def _alike(values: Sequence[Any]) -> bool:
    """Return True for several values of one registered type."""
    return len(values) > 1 and type(values[0]) in _fields and len(set(map(type, values))) == 1


def _table(values: Sequence[Any], large: list[Any] | None) -> msgpack.ExtType:
    """Encode many values of one type as one list per field, which saves a message within the message for each value."""
    cls = type(values[0])
    names = _fields[cls]
    rows = map(attrgetter(*names), values)
    columns = zip(*rows, strict=True) if len(names) > 1 else [tuple(rows)]
    plain = [_column(column, large) for column in columns]
    return msgpack.ExtType(_TABLE, encode([_names[cls], plain], large))


def _column(values: Sequence[Any], large: list[Any] | None) -> object:
    """Encode one field of many values: all parts of one type at once, and an object that many values share once."""
    kinds = set(map(type, values))
    if kinds <= _FLAT:
        return list(values)
    if kinds.isdisjoint((list, dict)):
        if 2 * len(set(map(id, values))) <= len(values):
            keys = list(map(id, values))
            distinct = dict(zip(keys, values, strict=True))
            numbers = {key: number for number, key in enumerate(distinct)}
            shared = [_column(list(distinct.values()), large), list(map(numbers.__getitem__, keys))]
            return msgpack.ExtType(_SHARED, encode(shared, large))
        if kinds != {tuple}:
            return _table(values, large) if _alike(values) else [_field(each, large) for each in values]
        parts = list(chain.from_iterable(values))
        inner = set(map(type, parts))
        if inner <= _FLAT:
            return list(map(list, values))
        if len(inner) == 1 and _fields.keys() >= inner:
            return msgpack.ExtType(_RAGGED, encode([_column(parts, large), list(map(len, values))], large))
    if kinds == {dict} and _FLAT.issuperset(map(type, chain.from_iterable(map(dict.values, values)))):
        return list(values)
    return [_field(each, large) for each in values]


def _encode_array(large: list[Any] | None, value: Any) -> object:
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        cls = type(value)
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__} can't travel to another process; send plain data or `api` types"
        )
    if value.dtype == object:
        return msgpack.ExtType(_OBJECTS, encode([list(value.shape), value.ravel().tolist()]))
    array = np.ascontiguousarray(value)
    if large is None or array.nbytes < LARGE_BYTES or len(large) >= MAX_LARGE:
        return msgpack.ExtType(_ARRAY, encode((array.dtype.str, list(array.shape), array.tobytes())))
    large.append(array.reshape(-1).view(np.uint8))
    return msgpack.ExtType(_LARGE, encode((array.dtype.str, list(array.shape), len(large) - 1)))


def _decode(large: Sequence[Any], depth: int, code: int, data: bytes) -> object:
    if code in (_ARRAY, _LARGE, _OBJECTS):
        return _decode_array(large, depth, code, data)
    if code == _EXACT:
        return decode(data, large, depth, exact=True)
    if code == _TUPLE:
        return tuple(decode(data, large, depth, exact=True))
    if code == _SET:
        return frozenset(decode(data, (), depth))
    if code == _BIG:
        return int(data)
    if code == _RAGGED:
        parts, lengths = decode(data, large, depth)
        if sum(lengths) != len(parts):
            raise ValueError(f"wire: {len(parts)} parts for values of {sum(lengths)} parts")
        left = iter(parts)
        return tuple(tuple(islice(left, length)) for length in lengths)
    if code == _SHARED:
        distinct, places = decode(data, large, depth)
        return tuple(map(distinct.__getitem__, places))
    if code not in (_TYPE, _TABLE, _PACKED):
        raise ValueError(f"wire: unknown extension {code}; both sides must run the same relax-core")
    name, values = decode(data, large, depth)
    if name not in _registry:
        raise ValueError(f"wire: unknown type {name!r}; both sides must run the same relax-core")
    cls = _registry[name]
    if code == _PACKED:
        return cls.unpack(values)
    return cls(*values) if code == _TYPE else tuple(map(cls, *values))


def _decode_array(large: Sequence[Any], depth: int, code: int, data: bytes) -> np.ndarray:
    import numpy as np

    if code == _OBJECTS:
        shape, values = decode(data, (), depth)
        objects = np.empty(len(values), object)
        for place, held in enumerate(values):  # assigned one by one, since numpy would turn tuples into array rows
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
        "batch", "bus", "component", "engine", "environment", "events", "plan", "reward",
        "role", "run_commands", "sandbox", "source", "task", "trainer", "trajectory", "weights",
    ):  # fmt: skip
        module = importlib.import_module(f"relax_core.api.{module_name}")
        for value in vars(module).values():
            if not isinstance(value, type) or value.__module__ != module.__name__ or value.__name__ in _STAYING:
                continue
            plain_tuple = issubclass(value, tuple) and (hasattr(value, "_fields") or hasattr(value, "unpack"))
            if plain_tuple or dataclasses.is_dataclass(value) or issubclass(value, Enum):
                register(value)
    register(importlib.import_module("relax_core.api.algorithm").Source)  # the rest of that module holds tensors


_pending.append(_register_all)
