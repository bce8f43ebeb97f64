# SPDX-License-Identifier: Apache-2.0
"""The reward `code`: runs the response's program in the run's sandbox on test cases with expected values.

The program is the last fenced block of the response. A case is input text or a function call. Expected values never
enter the box, so a program cannot forge its verdict: its output is compared outside of the box.
"""

from __future__ import annotations

import ast
import json
import math
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.api import (
    Box,
    Gold,
    InfrastructureError,
    Options,
    Outcome,
    ProgramEnd,
    ProgramResult,
    Reward,
    SandboxLimits,
    Score,
    Task,
    Trajectory,
)

FENCE = re.compile(r"^```([^\n`]*)\n(.*?)(^```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
"""A fenced block: language, text and closing fence, which is empty for a block that is never closed. Such a block
reaches to the end, so that no part of the response is searched twice."""
LANGUAGES = {
    "": "python", "py": "python", "python": "python", "python3": "python", "c": "c", "c++": "c++", "cpp": "c++", "cc": "c++",
}  # fmt: skip
COMPILE = {
    "c": ("main.c", ("cc", "-O2", "-std=c11", "-o", "main", "main.c", "-lm")),
    "c++": ("main.cc", ("c++", "-O2", "-std=c++17", "-o", "main", "main.cc")),
}
COMPILE_S = 30.0
NOT_FOUND = 127
_SHOWN = 80
DRIVER = """\
import json, os, pickle, sys
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
name, arguments, named = pickle.load(sys.stdin.buffer)
space = {"__name__": "program"}
exec(compile(open("main.py").read(), "main.py", "exec"), space)
holder = space["Solution"]() if name not in space and "Solution" in space else None
function = getattr(holder, name) if holder is not None else space[name]
answer.write(json.dumps(function(*arguments, **named), default=list))
answer.flush()
os._exit(0)
"""
"""Program in the box that calls one function of `main.py` and writes its value to stdout; `print` writes to stderr.

The call is pickled, because JSON would change tuples, sets and keys that are numbers.
"""
_FORMS = (
    'write a list of {"input": text, "output": text}, {"function": name, "arguments": [...], "output": value} or '
    '"assert f(1, 2) == 3", or one table {"inputs": [...], "outputs": [...], "fn_name": name}'
)
_CALLS = (
    'write a list of arguments, such as ["abc"], a table of named arguments, or a text with one JSON value per line, '
    "which is one argument; if the arguments are such a text, a text as output is JSON too"
)


class CodeOptions(Options):
    """Options of `code`."""

    language: Literal["auto", "python", "c", "c++"] = "auto"
    """Language of the program; `auto`: the language named by the fenced block, Python if it names none."""
    mode: Literal["all", "share"] = "all"
    """`all`: 1 if every case passes, else 0; `share`: the share of cases that pass."""
    max_cases: NonNegativeInt = 0
    """Maximum number of a task's cases to run, starting with the first; 0: all cases."""
    tolerance: NonNegativeFloat = 1e-6
    """Maximum difference of non-integer numbers, relative to the expected value (absolute for values below 1)."""
    case_s: PositiveFloat = 5.0
    """Time limit of the program in each case, in seconds."""
    program_memory_mb: PositiveInt = 512
    """Memory limit of the program in MiB."""
    truncated: bool = False
    """Judge truncated responses too; by default a truncated response scores 0."""


@dataclass(frozen=True, slots=True)
class Case:
    """A test case: input text and expected output, or a function's arguments and expected value."""

    stdin: str = ""
    function: str = ""
    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    expected: Any = ""
    unwraps: bool = False
    """True: the only item of the list `expected` is right too, because APPS writes the value 3 as `[3]`."""

    def __str__(self) -> str:
        if not self.function:
            return f"{_shown(self.stdin)} -> {_shown(self.expected)}"
        arguments = [*map(repr, self.arguments), *(f"{name}={value!r}" for name, value in self.named.items())]
        return f"{self.function}({', '.join(arguments)[:_SHOWN]}) -> {_shown(self.expected)}"


class Code(Reward[CodeOptions]):
    """A reward of 1 if the response's program passes every case, or the share of cases that pass."""

    needs_columns = ("cases",)

    def __init__(self, options: CodeOptions | None = None) -> None:
        super().__init__(options)
        self.needs_sandbox = SandboxLimits(wall_s=self.options.case_s, memory_mb=self.options.program_memory_mb)

    def gold(self, task: Task) -> Gold:
        cases = self._cases(task)
        return Gold(f"the first of {len(cases)} as {cases[0]}", ())

    def _cases(self, task: Task) -> list[Case]:
        cases = read_cases(task.id, task.column("cases"))
        called = next((case.function for case in cases if case.function), "")
        if called and self.options.language not in ("auto", "python"):
            fix = f"which a program in {self.options.language} can't offer; give input text, or set language to python"
            raise ValueError(f"task {task.id}: column cases calls the function {called}, {fix}")
        return cases

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        cases = self._cases(task)[: self.options.max_cases or None]
        program = find_program(trajectory.response, self.options.language)
        if program is None or (trajectory.outcome is Outcome.TRUNCATED and not self.options.truncated):
            return Score(0.0, {"passed": 0.0})
        language, text = program
        passed = 0
        async with self.sandbox.open() as box:
            if await self._prepared(box, language, text):
                for case in cases:
                    right = await self._right(box, language, case)
                    passed += right
                    if not right and self.options.mode == "all":
                        break
        share = passed / len(cases)
        return Score(float(share == 1.0) if self.options.mode == "all" else share, {"passed": share})

    async def _prepared(self, box: Box, language: str, text: str) -> bool:
        """Write the program to the box and compile it; return False if compilation fails."""
        if language == "python":
            await box.write("main.py", text.encode(errors="replace"))
            await box.write("driver.py", DRIVER.encode())
            return True
        file, command = COMPILE[language]
        await box.write(file, text.encode(errors="replace"))
        compiled = await box.run(command, wall_s=COMPILE_S)
        if compiled.code == NOT_FOUND or b"prlimit: failed to execute" in compiled.stderr:
            raise InfrastructureError(
                f'reward code: the sandbox has no compiler {command[0]!r}; install it, or set language = "python"'
            )
        return compiled.end is ProgramEnd.OK

    async def _right(self, box: Box, language: str, case: Case) -> bool:
        if not case.function:
            command = [box.python, "-I", "main.py"] if language == "python" else ["./main"]
            result = await box.run(command, case.stdin.encode())
            return result.end is ProgramEnd.OK and same_text(_text(result), case.expected, self.options.tolerance)
        if language != "python":
            return False
        call = pickle.dumps((case.function, case.arguments, dict(case.named)), protocol=4)
        result = await box.run([box.python, "-I", "driver.py"], call)
        if result.end is not ProgramEnd.OK:
            return False
        accepted = [case.expected, *(case.expected if case.unwraps else ())]
        try:
            value = json.loads(_text(result))
            return any(same_value(value, expected, self.options.tolerance) for expected in accepted)
        except (ValueError, RecursionError):
            return False


def find_program(response: str, language: str) -> tuple[str, str] | None:
    """Return language and text of the last fenced block in `language`; None if there is no such block.

    `auto` accepts any supported language.
    """
    found = [(LANGUAGES.get(name.strip().lower()), text) for name, text, end in FENCE.findall(response) if end]
    for known, text in reversed(found):
        if language in ("auto", known) and known is not None:
            return known, text
    return None


def read_cases(task: str, column: Any) -> list[Case]:
    """Return the cases of a task. Raises ValueError naming task, field, value and fix if a case can't be read.

    The column is a list of `{input, output}`, `{function, arguments, output}` or `assert f(1) == 2`, or one table
    `{inputs, outputs}` with an optional `fn_name`, as in APPS; each also as JSON text.
    """
    try:
        decoded = json.loads(column) if isinstance(column, str) else column
        cases = list(_table(decoded) if isinstance(decoded, Mapping) else _listed(decoded))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"task {task}: column cases can't be read: {error}") from error
    if not cases:
        raise ValueError(f"task {task} has no cases; give every row of the task file a non-empty `cases` column")
    return cases


def _table(table: Mapping[str, Any]) -> Iterator[Case]:
    inputs, outputs = _field(table, "inputs"), _field(table, "outputs")
    for name, values in (("inputs", inputs), ("outputs", outputs)):
        if not isinstance(values, list | tuple):
            raise ValueError(f"{name} is {_shown(values)}; write a list with one item per case")
    if len(inputs) != len(outputs):
        raise ValueError(f"inputs has {len(inputs)} items but outputs has {len(outputs)}; write one of both per case")
    function = table.get("fn_name") or table.get("function")
    cases = [
        _case(function, given, expected, f"inputs.{at}", f"outputs.{at}")
        for at, (given, expected) in enumerate(zip(inputs, outputs, strict=True))
    ]
    values = [case.expected for case in cases if case.function]
    unwraps = bool(values) and all(isinstance(value, list | tuple) and len(value) == 1 for value in values)
    yield from (replace(case, unwraps=unwraps) for case in cases)


def _listed(rows: Any) -> Iterator[Case]:
    if not isinstance(rows, list | tuple | None):
        raise ValueError(f"got {_shown(rows)}; {_FORMS}")
    for at, row in enumerate(rows or ()):
        if isinstance(row, str):
            yield from _asserted(row, f"{at}")
            continue
        if not isinstance(row, Mapping):
            raise ValueError(f"{at} is {_shown(row)}; {_FORMS}")
        function = row.get("function") or row.get("fn_name")
        if not function and "function" in str(row.get("testtype") or row.get("type")):
            raise ValueError(f'{at} is a call without the name of its function; add "function": name')
        key = "arguments" if function and "arguments" in row else "input"
        given, expected = _field(row, key, f"{at}."), _field(row, "output", f"{at}.")
        yield _case(function, given, expected, f"{at}.{key}", f"{at}.output")


def _field(row: Mapping[str, Any], key: str, where: str = "") -> Any:
    if key not in row:
        raise ValueError(f"{where}{key} is missing, the keys are {', '.join(map(str, row)) or 'none'}; {_FORMS}")
    return row[key]


def _case(function: Any, given: Any, expected: Any, where: str, where_expected: str) -> Case:
    """Return a case of a call if `function` is not empty, else of input and output text."""
    if not function:
        return Case(stdin=_lines(given, where), expected=_lines(expected, where_expected))
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"the function is {_shown(function)}; write its name alone, such as `solve`")
    arguments, named = given, {}
    if isinstance(given, str):
        arguments = [_json(line, where) for line in given.strip().split("\n")]
        expected = _json(expected, where_expected) if isinstance(expected, str) else expected
    elif isinstance(given, Mapping) and all(isinstance(key, str) and key.isidentifier() for key in given):
        arguments, named = (), dict(given)
    elif not isinstance(given, list | tuple):
        raise ValueError(f"{where} is {_shown(given)}; {_CALLS}")
    try:
        reached = same_value(json.loads(json.dumps(expected, default=list)), expected, 0.0)
    except (TypeError, ValueError):
        reached = False
    if not reached:
        raise ValueError(f"{where_expected} is {_shown(expected)}, which no returned value equals; write a JSON value")
    return Case(function=function, arguments=tuple(arguments), named=named, expected=expected)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"{where} has the text {_shown(text)}, which is not JSON; {_CALLS}") from None


def _lines(value: Any, where: str) -> str:
    """Return the text of an input or output, which may be a number, or a list of lines with or without line ends."""
    if isinstance(value, list | tuple) and all(isinstance(line, str) for line in value):
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in value[:-1]) + "".join(value[-1:])
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
        return str(int(value) if value == int(value) else value)
    fix = "write text or a list of lines, or name the function that the case calls"
    raise ValueError(f"{where} is {_shown(value)}; {fix}")


def _asserted(text: str, where: str) -> Iterator[Case]:
    """Parse lines like `assert f(1, 2) == 3`. The assertions never run, because the program could disable them."""
    statement: ast.stmt | None = None
    try:
        for statement in ast.parse(text.strip()).body:
            match statement:
                case ast.Assert(ast.Compare(ast.Call(ast.Name(function), given, keywords), [ast.Eq()], [value])) if all(
                    one.arg for one in keywords
                ):
                    named = {str(one.arg): ast.literal_eval(one.value) for one in keywords}
                    arguments, expected = [ast.literal_eval(one) for one in given], ast.literal_eval(value)
                case _:
                    raise ValueError("the line does not compare one call with one value")
            case = _case(function, arguments, expected, where, where)
            yield replace(case, named=named)
    except (ValueError, TypeError, SyntaxError, MemoryError) as error:
        said = ast.unparse(statement) if statement else text.strip()
        fix = "write lines like `assert f(1, 2) == 3`, with literals as arguments and value"
        raise ValueError(f"{where} is {_shown(said)}, which can't be read ({error}); {fix}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def same_text(answer: str, expected: str, tolerance: float) -> bool:
    """Return True if the texts agree word by word; non-integer numbers may differ by `tolerance`."""
    ours, theirs = answer.split(), expected.split()
    return len(ours) == len(theirs) and all(
        one == other or _near(_number(one), _number(other), tolerance) for one, other in zip(ours, theirs, strict=True)
    )


def same_value(answer: Any, expected: Any, tolerance: float) -> bool:
    """Return True if a value decoded from JSON equals the expected Python value.

    An expected tuple equals a list, an expected set equals a list in any order, and expected keys are compared as
    strings.
    """
    if isinstance(expected, set | frozenset):
        return (
            isinstance(answer, list)
            and len(answer) == len(expected)
            and all(any(same_value(one, other, tolerance) for one in answer) for other in expected)
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(answer, list)
            and len(answer) == len(expected)
            and all(same_value(one, other, tolerance) for one, other in zip(answer, expected, strict=True))
        )
    if isinstance(expected, Mapping):
        named = {str(key): value for key, value in expected.items()}
        return (
            isinstance(answer, dict)
            and answer.keys() == named.keys()
            and all(same_value(answer[key], value, tolerance) for key, value in named.items())
        )
    if isinstance(expected, bool) or isinstance(answer, bool) or not isinstance(expected, int | float):
        return type(answer) is type(expected) and bool(answer == expected)
    return isinstance(answer, int | float) and (answer == expected or _near(answer, expected, tolerance))


def _near(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None or (isinstance(one, int) and isinstance(other, int)):
        return False
    try:
        return math.isfinite(one) and math.isfinite(other) and abs(one - other) <= tolerance * max(1.0, abs(other))
    except OverflowError:  # a whole number larger than all floats
        return False


def _number(word: str) -> float | None:
    """Return the word as a number, or None; integers stay int so that they are compared exactly."""
    try:
        return int(word) if re.fullmatch(r"[+-]?\d{1,4000}", word) else float(word)
    except ValueError:
        return None


def _text(result: ProgramResult) -> str:
    return result.stdout.decode(errors="replace")
