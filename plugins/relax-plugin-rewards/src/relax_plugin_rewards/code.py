# SPDX-License-Identifier: Apache-2.0
"""The reward `code`: runs the response's program in the run's sandbox on test cases with expected values.

The program is the last fenced block of the response. A case is input text or a function call. Expected values never
enter the box, so a program cannot forge its verdict: its output is compared outside of the box.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from relax_core.api import (
    Box,
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

FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LANGUAGES = {
    "": "python", "py": "python", "python": "python", "python3": "python", "c": "c", "c++": "c++", "cpp": "c++", "cc": "c++",
}  # fmt: skip
COMPILE = {
    "c": ("main.c", ("cc", "-O2", "-std=c11", "-o", "main", "main.c", "-lm")),
    "c++": ("main.cc", ("c++", "-O2", "-std=c++17", "-o", "main", "main.cc")),
}
COMPILE_S = 30.0
NOT_FOUND = 127
DRIVER = """\
import json, os, sys
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
name, arguments = json.load(sys.stdin)
space = {"__name__": "program"}
exec(compile(open("main.py").read(), "main.py", "exec"), space)
holder = space["Solution"]() if name not in space and "Solution" in space else None
function = getattr(holder, name) if holder is not None else space[name]
answer.write(json.dumps(function(*arguments), default=list))
answer.flush()
os._exit(0)
"""
"""Program in the box that calls one function of `main.py` and writes its value to stdout; `print` writes to stderr."""


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
    expected: Any = ""


class Code(Reward[CodeOptions]):
    """A reward of 1 if the response's program passes every case, or the share of cases that pass."""

    needs_columns = ("cases",)

    def __init__(self, options: CodeOptions | None = None) -> None:
        super().__init__(options)
        self.needs_sandbox = SandboxLimits(wall_s=self.options.case_s, memory_mb=self.options.program_memory_mb)

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        cases = read_cases(task.id, task.column("cases"))[: self.options.max_cases or None]
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
            return result.end is ProgramEnd.OK and same_text(_text(result), str(case.expected), self.options.tolerance)
        if language != "python":
            return False
        call = json.dumps([case.function, case.arguments])
        result = await box.run([box.python, "-I", "driver.py"], call.encode())
        if result.end is not ProgramEnd.OK:
            return False
        try:
            return same_value(json.loads(_text(result)), case.expected, self.options.tolerance)
        except (ValueError, RecursionError):
            return False


def find_program(response: str, language: str) -> tuple[str, str] | None:
    """Return language and text of the last fenced block in `language`; None if there is no such block.

    `auto` accepts any supported language.
    """
    found = [(LANGUAGES.get(name.strip().lower()), text) for name, text in FENCE.findall(response)]
    for known, text in reversed(found):
        if language in ("auto", known) and known is not None:
            return known, text
    return None


def read_cases(task: str, column: Any) -> list[Case]:
    """Return the cases of a task. Raises ValueError naming the task if they can't be read.

    The column is a list of `{input, output}`, `{function, arguments, output}` or `assert f(1) == 2`, or one table
    `{inputs, outputs}` with an optional `fn_name`; each also as JSON text.
    """
    try:
        decoded = json.loads(column) if isinstance(column, str) else column
        cases = list(_cases(decoded))
    except (ValueError, TypeError, KeyError, AttributeError, SyntaxError) as error:
        raise ValueError(f"task {task}: column cases can't be read ({error}); correct it") from error
    if not cases:
        raise ValueError(f"task {task} has no cases; give every row of the task file a non-empty `cases` column")
    return cases


def _cases(decoded: Any) -> Iterator[Case]:
    if isinstance(decoded, Mapping):
        name = decoded.get("fn_name") or decoded.get("function") or ""
        for given, expected in zip(decoded["inputs"], decoded["outputs"], strict=True):
            yield (
                Case(function=name, arguments=tuple(given), expected=expected) if name else _text_case(given, expected)
            )
        return
    for one in decoded or ():
        if isinstance(one, str):
            yield _asserted(one)
        elif name := one.get("function"):
            yield Case(function=str(name), arguments=tuple(one.get("arguments", ())), expected=one["output"])
        else:
            yield _text_case(one["input"], one["output"])


def _text_case(given: Any, expected: Any) -> Case:
    """Return a case of input and output text; a list of lines is joined to one text."""
    texts = ["\n".join(map(str, one)) if isinstance(one, Sequence) and not isinstance(one, str) else str(one)
             for one in (given, expected)]  # fmt: skip
    return Case(stdin=texts[0], expected=texts[1])


def _asserted(line: str) -> Case:
    """Parse `assert f(1, 2) == 3` into a case. The assertion never runs, because the program could disable it."""
    test = ast.parse(line.strip()).body[0]
    if isinstance(test, ast.Assert) and isinstance(test.test, ast.Compare) and isinstance(test.test.ops[0], ast.Eq):
        call, value = test.test.left, test.test.comparators[0]
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.keywords:
            arguments = tuple(ast.literal_eval(argument) for argument in call.args)
            return Case(function=call.func.id, arguments=arguments, expected=ast.literal_eval(value))
    raise ValueError(f"{line.strip()[:80]!r} is not of the form `assert f(1, 2) == 3` with literals")


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
    return math.isfinite(one) and math.isfinite(other) and abs(one - other) <= tolerance * max(1.0, abs(other))


def _number(word: str) -> float | None:
    """Return the word as a number, or None; integers stay int so that they are compared exactly."""
    try:
        return int(word) if re.fullmatch(r"[+-]?\d{1,4000}", word) else float(word)
    except ValueError:
        return None


def _text(result: ProgramResult) -> str:
    return result.stdout.decode(errors="replace")
