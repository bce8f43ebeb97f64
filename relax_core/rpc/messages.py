# SPDX-License-Identifier: Apache-2.0
"""The wire format between processes: msgpack of plain data, numpy arrays and the dataclasses of `api`.

Decoding builds only registered types, so nothing that arrives can run code. Both sides state `PROTOCOL` at the
first call and refuse another. Pickle is never used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import starmap
from operator import attrgetter
from typing import Any, TypeVar

PROTOCOL = 2

_TYPE, _ARRAY, _SET, _BIG, _TABLE = 1, 2, 3, 4, 5
_registry: dict[str, type] = {}
_fields: dict[type, tuple[str, ...]] = {}
T = TypeVar("T", bound=type)


def register(cls: T) -> T:
    """Let a dataclass, named tuple or enum travel; a decorator. Names are unique by class name."""
    known = _registry.setdefault(cls.__name__, cls)
    if known is not cls and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"wire type {cls.__name__}: {known.__module__} and {cls.__module__} both register it")
    _registry[cls.__name__] = cls
    if dataclasses.is_dataclass(cls):
        _fields[cls] = tuple(field.name for field in dataclasses.fields(cls))
    return cls


def encode(value: Any) -> bytes:
    """Bytes of plain data, arrays and registered types; TypeError names what can't travel."""
    import msgpack

    _register_api()
    if type(value) is list and _alike(value):
        value = _table(value)
    return bytes(msgpack.packb(value, default=_encode, strict_types=True, use_bin_type=True))


def decode(data: bytes | memoryview) -> Any:
    """The value; sequences come back as tuples. ValueError for an unknown type."""
    import msgpack

    _register_api()
    return msgpack.unpackb(data, ext_hook=_decode, use_list=False, strict_map_key=False, raw=False)


def _encode(value: Any) -> Any:
    import msgpack

    cls = type(value)
    if cls in _fields:  # tuples as lists: each that msgpack has to ask about is a call of this
        values = [getattr(value, name) for name in _fields[cls]]
        plain = [list(each) if type(each) is tuple else each for each in values]
        return msgpack.ExtType(_TYPE, encode([cls.__name__, plain]))
    if isinstance(value, Enum):
        return msgpack.ExtType(_TYPE, encode((cls.__name__, (value.value,))))
    if isinstance(value, tuple):
        if not hasattr(cls, "_fields"):  # no named one: RowIds differ from plain tuples in how they are pickled only
            return _table(value) if _alike(value) else list(value)
        return msgpack.ExtType(_TYPE, encode([cls.__name__, list(value)]))
    if isinstance(value, (set, frozenset)):
        return msgpack.ExtType(_SET, encode(list(value)))
    if isinstance(value, dict) or hasattr(value, "keys"):
        return dict(value)
    if isinstance(value, int):
        return msgpack.ExtType(_BIG, str(int(value)).encode())
    return _encode_array(value)


def _alike(values: Sequence[Any]) -> bool:
    """Whether they are several objects of one dataclass that has several fields."""
    return len(values) > 1 and len(_fields.get(type(values[0]), ())) > 1 and len(set(map(type, values))) == 1


def _table(values: Sequence[Any]) -> Any:
    """Objects of one dataclass at once: one by one, each would be a message within the message."""
    import msgpack

    cls = type(values[0])
    rows = map(attrgetter(*_fields[cls]), values)
    plain = [[list(each) if type(each) is tuple else each for each in row] for row in rows]
    return msgpack.ExtType(_TABLE, encode([cls.__name__, plain]))


def _encode_array(value: Any) -> Any:
    import msgpack
    import numpy as np

    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        array = np.ascontiguousarray(value)
        return msgpack.ExtType(_ARRAY, encode((array.dtype.str, list(array.shape), array.tobytes())))
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} can't travel; send plain data or an api type")


def _decode(code: int, data: bytes) -> Any:
    if code == _ARRAY:
        import numpy as np

        dtype, shape, raw = decode(data)
        return np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape)
    if code == _SET:
        return frozenset(decode(data))
    if code == _BIG:
        return int(data)
    if code not in (_TYPE, _TABLE):
        raise ValueError(f"wire: unknown extension {code}; both sides must run the same relax-core")
    name, values = decode(data)
    if name not in _registry:
        raise ValueError(f"wire: unknown type {name}; both sides must run the same relax-core")
    return _registry[name](*values) if code == _TYPE else tuple(starmap(_registry[name], values))


_pending: list[Callable[[], None]] = []


def _register_api() -> None:
    while _pending:
        _pending.pop()()


def _register_all() -> None:
    import importlib

    for module_name in (
        "algorithm", "batch", "bus", "engine", "environment", "events", "plan", "reward", "role", "source", "status",
        "task", "trainer", "trajectory", "weights", "worker",
    ):  # fmt: skip
        module = importlib.import_module(f"relax_core.api.{module_name}")
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__ and _travels(value):
                register(value)


def _travels(cls: type) -> bool:
    return (
        dataclasses.is_dataclass(cls) or issubclass(cls, Enum) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    )


_pending.append(_register_all)
