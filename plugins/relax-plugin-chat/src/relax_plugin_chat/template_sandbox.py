# SPDX-License-Identifier: Apache-2.0
"""The sandbox for chat templates: Jinja's, with bounds on the length, the work and the time of every rendering.

Model folders may be untrusted, and a rendering can't be interrupted from outside. So each step that can loop, or make or
read a long value, is counted before it runs: operators, comparisons, calls, filters, tests, macros, items of loops and
iterators, and written text. A step makes no value beyond the limit of one rendering. So counted work ends a hostile
template on any machine; the limit on processor time is a second net.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, cast

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg

MAX_BITS = 1 << 12
"""Bits of a power or a product."""
MAX_REPEATED = 1 << 20
"""Characters and items of one value or of the rendered text, besides `PER_INPUT` of each character of the input."""
PER_INPUT = 16
WORK = 16
"""Steps of a rendering, and characters of all its values together, as a multiple of the limit of one value."""
MAX_WIDTH = 1 << 16
"""Largest number that a filter accepts as an argument, and longest text that a slow filter accepts."""
MAX_TEMPLATE = 1 << 18
"""Characters of a template. The templates of models have some ten thousand."""
MAX_CALLS = 100
"""Nested calls of macros."""
MAX_S = 5.0
"""Seconds of processor time of one rendering."""
SHORT = 100
"""Characters of a constant whose reading is part of a step."""
STEP = 8
"""Characters that one step counts for."""
CHECKED = 8
"""Steps between two looks at the clock."""
_SHALLOW = frozenset((
    "length", "count", "first", "last", "list", "items", "default", "d", "reverse", "attr", "int", "float", "abs",
    "round",
))  # fmt: skip
"""Filters that do not read the items of their values."""
_LAZY = frozenset(("map", "select", "reject", "selectattr", "rejectattr", "batch", "slice"))
"""Filters that read one item of their value after the other, but not what the items hold."""
_WHOLE = frozenset(("join", "sum", "sort", "unique", "groupby", "min", "max"))
"""Filters that compare or join the items of any iterable."""
_READING = frozenset((
    "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=", "in",
    "lower", "upper",
))  # fmt: skip
"""Tests that read their values."""
_ANY_NUMBER = frozenset((
    "default", "d", "map", "select", "reject", "selectattr", "rejectattr", "int", "float", "truncate",
))  # fmt: skip
"""Filters whose numbers can't make a value long."""
_TEXTS = (str, bytes)
_HOLDERS = (list, tuple, dict)
_ITEMS: Any = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
"""Types whose items `_size` counts."""
_ADDRESSED = (Iterator, BuiltinMethodType, FunctionType, MethodType)
"""Types whose text has an address of memory."""
_SLOW = frozenset(("urlize", "wordwrap", "pprint", "striptags"))
"""Filters that accept only short texts."""
_QUICK = frozenset(("get", "keys", "values", "items"))
"""Methods of lists and tables that do not read all items."""
_SEARCHING = frozenset(("strip", "lstrip", "rstrip", "rsplit", "rpartition", "rfind", "rindex"))
"""Methods of texts whose time may grow with the product of two lengths."""
SEARCHED = 16
"""Comparisons of characters that count as one character."""
CODECS = ("utf-8", "utf8", "ascii", "latin-1")
"""Encodings that a template may use; some others take quadratic time."""
_PADS = frozenset(("center", "ljust", "rjust", "zfill"))
_GROWING = _PADS | {"expandtabs", "replace", "join", "translate", "format", "format_map"}
"""Methods of texts whose results may be longer than the text."""
_COMPUTED = {"%": re.compile(r"%[^%a-zA-Z]*\*"), "{": re.compile(r"\{[^{}]*\{")}
"""Patterns of a width that a format takes from its values."""


@dataclass(slots=True)
class _Work:
    """The work that one rendering may still do."""

    limit: int
    """Characters and items of one value."""
    left: int
    clock: Callable[[], float]
    """Returns the processor time of this thread in seconds."""
    ends: float
    """Time of the clock at which the rendering fails."""
    steps: int = 0
    calls: int = 0
    used: list[Any] = field(default_factory=list)

    def spend(self, amount: int) -> None:
        """Count a step that makes or reads `amount` characters and items. Raises TemplateError beyond a limit."""
        self.steps += 1
        self.left -= amount + STEP
        if amount > self.limit or self.left < 0 or not self.steps % CHECKED:
            if amount > self.limit:
                raise TemplateError(f"a value of more than {self.limit} characters or items")
            if self.left < 0 or self.clock() > self.ends:
                raise TemplateError("a rendering with more work than a chat template needs")


_WORK: ContextVar[_Work] = ContextVar("work")


@contextmanager
def _bounded(size: int, clock: Callable[[], float] = time.thread_time) -> Iterator[_Work]:
    limit = MAX_REPEATED + PER_INPUT * size
    work = _Work(limit, WORK * limit, clock, clock() + MAX_S)
    token = _WORK.set(work)
    try:
        yield work
    finally:
        _WORK.reset(token)


def compiled(text: str, functions: Mapping[str, Callable[..., Any]]) -> Template:
    """Compile a template with functions by name. Raises TemplateSyntaxError, also if it is too long or nested deeply."""
    if len(text) > MAX_TEMPLATE:
        raise TemplateSyntaxError(f"the template has more than {MAX_TEMPLATE} characters", 1)
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.globals |= functions
    with _bounded(len(text)):
        try:
            return environment.from_string(text)
        except (RecursionError, SyntaxError, MemoryError) as error:
            raise TemplateSyntaxError(f"Python can't compile the template: {error}", 1) from error


def rendered(
    template: Template, variables: Mapping[str, Any], clock: Callable[[], float] = time.thread_time
) -> str:  # fmt: skip
    """Render a template of `compiled`. Raises TemplateError if it exceeds a limit, and any error of its expressions.

    `clock` returns the seconds of processor time that `MAX_S` limits.
    """
    pieces: list[str] = []
    with _bounded(_size(variables, 1 << 40), clock) as work:
        length = 0
        for piece in template.generate(variables):
            length += len(piece)
            if length > work.limit:
                raise TemplateError(f"the rendered text has more than {work.limit} characters")
            pieces.append(piece)
    return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with counted operators, comparisons, calls, filters, tests, loops and outputs."""

    intercepted_binops = frozenset({"**", "*", "+", "-", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, **options)
        self.filters["tojson"] = to_json
        self.filters = {name: _counted(name, each) for name, each in self.filters.items()}
        self.tests |= {name: _reading(cast(Any, self.tests[name])) for name in _READING}
        for name in ("lipsum", "cycler"):  # no chat template needs them
            del self.globals[name]
        del self.filters["random"]  # its text would differ in each process

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template; put counters into its loops, macros, literals and concatenations."""
        tree = super()._parse(source, name, filename)
        counted: tuple[Any, ...] = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
        for body in list(tree.find_all(counted)):
            length = sum(len(data.data) for data in body.find_all(nodes.TemplateData))
            if isinstance(body, nodes.For) and body.test is not None:
                body.test = nodes.And(_helper("tick", nodes.Const(0)), body.test)
            body.body.insert(0, nodes.ExprStmt(_helper("tick", nodes.Const(length))))
        _replace_values(tree)
        tree.set_environment(self)
        tree.set_lineno(1)  # of the nodes that have none
        return tree

    def tick(self, length: int) -> bool:
        _WORK.get().spend(length)
        return True

    def made(self, value: Any) -> Any:
        return _made(value)

    def read(self, value: Any) -> Any:
        """Count a value that is compared."""
        if type(value) is str:
            _WORK.get().spend(len(value))
        elif type(value) not in (int, bool):
            work = _WORK.get()
            work.spend(_size(value, work.limit))
        return value

    def sliced(self, value: Any) -> Any:
        """Count a copy of a part of a value."""
        _WORK.get().spend(_length(value))
        return value

    def joined(self, *parts: Any) -> str:
        texts = [part if type(part) is str else str(_written(part)) for part in parts]
        _WORK.get().spend(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        work = _WORK.get()
        if type(left) is str and type(right) is str and operator == "+":
            work.spend(len(left) + len(right))
            return left + right
        if operator == "+":
            if isinstance(left, str | bytes | list | tuple) and isinstance(right, str | bytes | list | tuple):
                work.spend(len(left) + len(right))
        elif operator == "-":
            if not (isinstance(left, int | float) and isinstance(right, int | float)):  # the keys of tables
                work.spend(_size(left, work.limit) + _size(right, work.limit))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and right * left.bit_length() > MAX_BITS:
                raise TemplateError(f"a power of more than {MAX_BITS} bits")
        elif operator == "%":
            if isinstance(left, str | bytes):
                text = left if isinstance(left, str) else left.decode("latin-1")
                work.spend(_formatted(text, "%", right))
        elif isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise TemplateError(f"a product of more than {MAX_BITS} bits")
        else:
            for text, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(text, Sequence):
                    if len(text) * times > MAX_REPEATED:
                        raise TemplateError(f"a repetition of more than {MAX_REPEATED} items")
                    work.spend(_size(text, work.limit) * max(0, times))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, set):  # the order of a set would differ in each process
            result = dict.fromkeys(key for key in left if key in result).keys()
        return _made(result)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as Jinja names them)
        if getattr(__obj, "__self__", None) is __self:  # a counter that `_parse` has put in
            return __obj(*args)
        work = _WORK.get()
        method = __obj if type(__obj) is BuiltinMethodType else getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, _TEXTS):
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
            work.spend(_text_length(owner, name, args, kwargs))
            return _made(super().call(__context, __obj, *args, **kwargs))
        if isinstance(owner, int | float):
            _check_numbers((*args, *kwargs.values()))
        elif isinstance(owner, (*_HOLDERS, *_ITEMS)) and name not in _QUICK:
            work.spend(_size(owner, work.limit))
        for value in (*args, *kwargs.values()):
            _made(value)
        work.spend(sum(len(value) for value in args if type(value) is str))
        work.calls += 1
        try:
            if work.calls > MAX_CALLS:
                raise TemplateError(f"more than {MAX_CALLS} nested calls")
            return _made(super().call(__context, __obj, *args, **kwargs))
        finally:
            work.calls -= 1


def _helper(name: str, *args: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), cast(list[nodes.Expr], list(args)), [], None, None)


def _replace_values(node: nodes.Node) -> None:
    """Count each concatenation, list, tuple and dict below a node, and the arguments that a macro collects."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            value[:] = [_replaced(one) if isinstance(one, nodes.Node) else one for one in value]
        elif isinstance(value, nodes.Node):
            setattr(node, name, _replaced(value))


def _replaced(node: nodes.Node) -> nodes.Node:
    _replace_values(node)
    if isinstance(node, nodes.Concat):
        return _helper("joined", *node.nodes)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _helper("sliced", node)
    if isinstance(node, nodes.Compare):
        node.expr = _read(node.expr)
        for operand in node.ops:
            operand.expr = _read(operand.expr)
        return node
    is_literal = isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load")
    if is_literal and not all(isinstance(one, nodes.Const) for one in node.iter_child_nodes()):
        return _helper("made", node)
    if isinstance(node, nodes.Name) and node.ctx == "load" and node.name in ("varargs", "kwargs"):
        return _helper("made", node)
    return node


def _read(node: nodes.Expr) -> nodes.Expr:
    """Count an operand of a comparison, unless it is a short constant."""
    is_short = isinstance(node, nodes.Const) and len(str(node.value)) <= SHORT
    return node if is_short else _helper("read", node)


def _made(value: Any) -> Any:
    """Count a list, tuple or dict with all that it holds, since a nested value can hold the same item many times.

    The items of an iterator are counted as they are drawn.
    """
    if type(value) is str:
        return value
    if isinstance(value, _HOLDERS):
        work = _WORK.get()
        work.spend(_size(value, work.limit))
    elif isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise TemplateError(f"a number of more than {MAX_BITS} bits")
    elif isinstance(value, Iterator) and not isinstance(value, LoopContext):
        return _drawn(value)
    return value


def _drawn(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        _WORK.get().spend(0)
        yield value


def _written(value: Any) -> Any:
    """Count a value that is written as text."""
    if isinstance(value, _ADDRESSED) and not isinstance(value, LoopContext):
        raise TemplateError(f"a {type(value).__name__} written as text, which would differ in each process")
    work = _WORK.get()
    work.spend(len(value) if type(value) is str else _size(value, work.limit))
    return value


def _size(value: Any, most: int) -> int:
    """Return the number of characters and items in nested data, or any number above `most` if there are more."""
    total, rest = 0, [value]
    while rest and total <= most:
        one = rest.pop()
        if isinstance(one, _TEXTS):
            total += len(one)
        elif isinstance(one, dict):
            total += 1 + len(one)
            rest.extend(dict.keys(one))
            rest.extend(dict.values(one))  # not its own `values`, which records what a template reads
        elif isinstance(one, _ITEMS):
            total += 1 + len(one)
            rest.extend(one)
        elif isinstance(one, range):
            total += 1 + len(one)
        elif isinstance(one, Namespace):
            total += SHORT  # it may hold itself
            rest.append(one._Namespace__attrs)  # its text shows them
        else:
            total += 1
    return total


def _length(value: Any) -> int:
    """Return the number of items of a value; 1 for a value without a length."""
    try:
        return len(value)
    except TypeError:
        return 1


def _check_numbers(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TemplateError(f"a width or count of more than {MAX_WIDTH}")


def _formatted(text: str, mark: str, values: Any) -> int:
    """Return a bound on the length of a formatted text. Raises TemplateError for a width that the values give."""
    if _COMPUTED[mark].search(text):
        raise TemplateError("a format with a width that is computed")
    widths = sum(int(digits) if len(digits) < 10 else MAX_REPEATED**2 for digits in re.findall(r"\d+", text))
    work = _WORK.get()
    return len(text) + widths + text.count(mark) * _size(values, work.limit)


def _text_length(text: str | bytes, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return a bound on the length of a method's result."""
    values = (*args, *kwargs.values())
    if name in _SEARCHING:
        return len(text) * (1 + max((_length(value) for value in values), default=0) // SEARCHED)
    if name in ("encode", "decode") and not all(isinstance(value, str) and value.lower() in CODECS for value in values):
        raise TemplateError(f"an encoding other than {', '.join(CODECS)}")
    if name not in _GROWING:
        return len(text) + (_size(values, _WORK.get().limit) if values else 0)
    if name in ("format", "format_map"):
        return _formatted(str(text), "{", values)
    width = max([0, *(value for value in values if isinstance(value, int))])
    if name in _PADS:
        return len(text) + width
    if name == "expandtabs":
        return len(text) * (1 + (width if values else 8))
    if name == "replace" and len(args) > 1:
        return _replaced_length(text, args[0], args[1])
    if name == "join":
        return _size(values, _WORK.get().limit) + len(text) * (len(args[0]) if args else 0)
    if name == "translate":
        return len(text) * _size(values, _WORK.get().limit)
    return len(text)


def _replaced_length(text: Any, old: Any, new: Any) -> int:
    fits = isinstance(text, _TEXTS) and isinstance(old, type(text)) and isinstance(new, _TEXTS)
    if not fits:
        return _size(text, _WORK.get().limit)
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts its values and bounds the length of its result before it runs."""
    skipped = 0 if _PassArg.from_obj(function) is None else 1

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        work = _WORK.get()
        value: Any = args[skipped] if len(args) > skipped else None
        more = (*args[skipped + 1 :], *kwargs.values())
        if name in _WHOLE:
            value = list(value)
            args = (*args[:skipped], value, *args[skipped + 1 :])
        if name not in _ANY_NUMBER:
            _check_numbers(more)
        if not more and type(value) is str:
            work.spend(len(value))
            if name not in _SLOW:
                return _made(function(*args, **kwargs))
        amount = STEP * _length(value) if name in _LAZY else 0 if name in _SHALLOW else _size(value, work.limit)
        amount *= 1 + max((one.count(".") for one in more if isinstance(one, str)), default=0)  # paths of attributes
        if name in _SLOW and amount > MAX_WIDTH:
            raise TemplateError(f"more than {MAX_WIDTH} characters for the filter {name}")
        longest = max((len(one) for one in more if isinstance(one, str)), default=1)
        width = max([longest, 4, *(one for one in more if isinstance(one, int))])
        if name == "join" or name == "wordwrap":
            amount += longest * len(value)
        elif name == "sum" and any(isinstance(one, _HOLDERS) for one in more):
            amount *= len(value)  # each sum is a new list
        elif name == "trim":
            amount *= 1 + longest // SEARCHED
        elif name == "indent":
            amount += width * (str(value).count("\n") + 1)
        elif name in ("center", "batch", "slice"):
            amount += width
        elif name == "replace" and len(more) > 1:
            amount = _replaced_length(str(value), str(more[0]), str(more[1]))
        elif name == "format":
            amount = _formatted(str(value), "%", more)
        work.spend(amount)
        return _made(function(*args, **kwargs))

    return limited


def _reading(test: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test that counts the values that it reads."""

    @wraps(test)
    def limited(*args: Any) -> Any:
        work = _WORK.get()
        work.spend(sum(_size(value, work.limit) for value in args))
        return test(*args)

    return limited


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's words for some trainers. Only its body is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return data as JSON text, as the filter `tojson` of transformers does."""
    options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    if not indent and separators is None:
        return json.dumps(value, **options)
    pieces = []
    for piece in json.JSONEncoder(**options).iterencode(value):
        _WORK.get().spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)
