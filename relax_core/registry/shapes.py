# SPDX-License-Identifier: Apache-2.0
"""Checks of values that less trusted code returned or sent, against the type annotations of the contracts.

An author's code may return anything, and a process of an author may send anything. Such a value is checked once, where
it enters the core, so that the sample, the plugin or the process is charged and never the role that reads the value.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from numbers import Integral, Real
from operator import call
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from relax_core.api.reward import LARGEST_REWARD

LONGEST = 80
"""Largest number of characters of a value that an error shows."""


class WrongShape(TypeError):
    """A value that does not have the type of its contract; the message names place, value, class and wanted type."""


def checked(value: Any, wanted: Any, where: str) -> Any:
    """Return `value` unchanged if it has the type `wanted`, an annotation; fields and items are checked too.

    Lists and tuples are interchangeable, numpy's numbers count as numbers, and an array of one number as that number.
    `Any` and abstract types are not checked. Raises WrongShape naming `where`, such as `step: reward`.
    """
    if not _plainly_fits(wanted)(value) and (fault := _fault(value, wanted, "")):
        place, got = fault
        raise WrongShape(f"{where}{place}: got {got}")
    return value


def reward_number(value: Any, where: str) -> float:
    """Return a reward as a plain float. Raises WrongShape for anything but a number of at most LARGEST_REWARD."""
    if type(value) is float and abs(value) <= LARGEST_REWARD:
        return value
    checked(value, float, where)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_REWARD:
        raise WrongShape(f"{where}: got {shown(value)}; want a finite number from -1e9 to 1e9")
    return number


def shown(value: Any, longest: int = LONGEST) -> str:
    """Return a value and its class for an error message; works for objects whose `repr` raises."""
    try:
        text = repr(value)
    except Exception:
        text = "a value whose repr raises"
    text = text if len(text) <= longest else f"{text[:longest]}..."
    return f"{text} ({type(value).__qualname__})"


def returned_by(method: Callable[..., Any]) -> str:
    """Name the result of an author's method for an error message: `file:line: Class.method()`."""
    function = inspect.unwrap(getattr(method, "__func__", method))
    code = getattr(function, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}: " if code is not None else ""
    return f"{place}{getattr(function, '__qualname__', type(method).__qualname__)}()"


_FLAT = frozenset({str, int, float, bool, bytes, type(None)})
"""Types whose values have no parts to check."""
_Fault = tuple[str, str]
"""(place within the value, value and wanted type as text)."""


@lru_cache(maxsize=256)
def _plainly_fits(wanted: Any) -> Callable[[Any], bool]:
    """Return a fast test that is True only for values of exactly the wanted types; `_fault` decides about the rest."""
    if wanted is Any or wanted is object:
        return lambda value: True
    origin, args = get_origin(wanted), get_args(wanted)
    is_union = origin in (Union, types.UnionType)
    if wanted in _FLAT or (is_union and _FLAT.issuperset(args)):
        kinds = frozenset(args or (wanted,))
        return lambda value: type(value) in kinds
    if is_union:
        flat = _FLAT.intersection(args)
        others = [_plainly_fits(each) for each in args if each not in flat]
        return lambda value: type(value) in flat or any(test(value) for test in others)
    tests = [_plainly_fits(each) for each in args if each is not Ellipsis]
    if origin is tuple and args and args[-1] is not Ellipsis:
        return lambda value: type(value) in (tuple, list) and len(value) == len(tests) and all(map(call, tests, value))
    if origin in (tuple, list, Sequence) and args:
        return lambda value: type(value) in (tuple, list) and all(map(tests[0], value))
    return lambda value: False


def _fault(value: Any, wanted: Any, place: str) -> _Fault | None:
    """Return the first part of a value that does not have its type; None if all parts have theirs."""
    if wanted is Any or wanted is object or (wanted in _FLAT and type(value) is wanted):
        return None
    if wanted is None or wanted is type(None):
        return None if value is None else (place, f"{shown(value)}; want None")
    origin, args = get_origin(wanted), get_args(wanted)
    if origin is Union or origin is types.UnionType:
        return _union_fault(value, args, place)
    if origin is Literal:
        return (
            None if any(value == each and type(value) is type(each) for each in args) else _want(value, wanted, place)
        )
    if origin is not None and isinstance(origin, type):
        return _container_fault(value, origin, args, wanted, place)
    if wanted is float and type(value) is int:
        return None
    if wanted is float or wanted is int:
        is_number = isinstance(value, Real if wanted is float else Integral) or _is_one_number(value)
        return None if is_number else _want(value, "a number" if wanted is float else "a whole number", place)
    if wanted is bool:
        is_flag = isinstance(value, Integral) or type(value).__name__ in ("bool_", "bool") or _is_one_number(value)
        return None if is_flag else _want(value, wanted, place)
    if not isinstance(wanted, type) or getattr(wanted, "_is_protocol", False):
        return None
    if not isinstance(value, wanted):
        return _want(value, wanted, place)
    for name, hint in _fields(wanted).items():
        if fault := _fault(getattr(value, name, None), hint, f"{place}.{name}"):
            return fault
    return None


def _union_fault(value: Any, args: Sequence[Any], place: str) -> _Fault | None:
    """Check the members of a union; the error is that of the member whose class the value has, if there is one."""
    if type(value) in _FLAT and type(value) in args:
        return None
    faults = [_fault(value, each, place) for each in args]
    if None in faults:
        return None
    inner = next((fault for fault in faults if fault is not None and fault[0] != place), None)
    return inner or _want(value, " or ".join(map(_name, args)), place)


def _container_fault(value: Any, origin: type, args: Sequence[Any], wanted: Any, place: str) -> _Fault | None:
    if issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return _want(value, "a mapping", place)
        entry = args[1] if len(args) > 1 else Any
        parts = value.items() if entry is not Any else ()
        faults = (_fault(part, entry, f"{place}[{key!r:.40}]") for key, part in parts)
        return next((fault for fault in faults if fault is not None), None)
    if issubclass(origin, Collection):
        sized = Sequence if issubclass(origin, Sequence) else Collection
        if not isinstance(value, sized) or isinstance(value, str | bytes | bytearray | Mapping):
            return _want(value, wanted, place)
        fixed = origin is tuple and bool(args) and args[-1] is not Ellipsis
        if fixed and len(value) != len(args):
            return _want(value, f"{len(args)} items", place)
        items = args if fixed else (args[0] if args else Any,) * len(value)
        if all(item is Any for item in items):
            return None
        pairs = enumerate(zip(value, items, strict=True))
        return next(
            (fault for index, (part, item) in pairs if (fault := _fault(part, item, f"{place}[{index}]"))), None
        )
    return None if isinstance(value, origin) else _want(value, wanted, place)


def _want(value: Any, wanted: Any, place: str) -> _Fault:
    return place, f"{shown(value)}; want {_name(wanted)}"


def _name(wanted: Any) -> str:
    if isinstance(wanted, type) and get_origin(wanted) is None:
        return wanted.__name__
    return str(wanted).replace("relax_core.api.", "").replace("collections.abc.", "").replace("typing.", "")


def _is_one_number(value: Any) -> bool:
    """Return True for a tensor or array of one number."""
    if getattr(value, "ndim", None) != 0 or not callable(getattr(value, "item", None)):
        return False
    try:
        return isinstance(value.item(), Real)
    except Exception:
        return False


@lru_cache(maxsize=256)
def _fields(cls: type) -> Mapping[str, object]:
    """Return the annotations of the fields of a dataclass or named tuple; empty for any other class."""
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
    elif issubclass(cls, tuple):
        names = list(getattr(cls, "_fields", ()))
    else:
        return {}
    if not names:
        return {}
    try:
        hints = get_type_hints(cls, localns={"np": sys.modules.get("numpy"), "torch": sys.modules.get("torch")})
    except (NameError, TypeError, AttributeError):  # an annotation that only type checkers can resolve
        return {}
    return {name: hints.get(name, Any) for name in names}
