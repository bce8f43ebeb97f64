# SPDX-License-Identifier: Apache-2.0
"""Programs of the policy against cases: right ones earn, and whatever else a program does earns nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from relax_plugin_rewards.code import Code, CodeOptions, find_program, read_cases, same_text, same_value

from relax_core.api import Chosen, Message, Outcome, Sandbox, Score, Task, Trajectory
from relax_core.registry import Catalogue
from relax_core.testing.direct_sandbox import DirectSandbox
from relax_core.testing.reward import RewardSuite

ADD = [{"input": "1 2\n", "output": "3\n"}, {"input": "-5 5\n", "output": "0\n"}]
FUNCTION = [
    {"function": "mid", "arguments": [[1, 2, 3]], "output": 2.0},
    {"function": "mid", "arguments": [[1, 2]], "output": 1.5},
]
SORTED = "def mid(v):\n    v = sorted(v)\n    n = len(v)\n    return (v[(n - 1) // 2] + v[n // 2]) / 2"
TURN = "def f(s):\n    return s[::-1]"
SUM = "a, b = map(int, input().split())\nprint(a + b)"
SUM_C = '#include <stdio.h>\nint main(void) { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); }'
SUM_CXX = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }"


def block(program: str, language: str = "python") -> str:
    return f"Here it is:\n```{language}\n{program}\n```\nDone."


async def judged(
    response: str, cases: Any = ADD, outcome: Outcome = Outcome.FINISHED, case_s: float = 600.0, **options: Any
) -> Score:
    reward = Code(CodeOptions(case_s=case_s, **options))
    assert reward.needs_sandbox is not None
    reward.sandbox = DirectSandbox(
        Catalogue.load().build(Chosen("sandbox", "bubblewrap"), Sandbox), reward.needs_sandbox
    )
    messages = (Message("user", "?"), Message("assistant", response))
    return await reward.score(Task("t", "?", None, {"cases": cases}), Trajectory(messages, response, (), outcome))


class TestCode(RewardSuite):
    component = "code"
    options = {"case_s": 600.0}
    samples = tuple(
        (Task("t", "Add two numbers.", None, {"cases": ADD}), response)
        for response in (block(SUM), block("print(3)"), "3", block("print("))
    )
    best = 0


@pytest.mark.parametrize(
    ("response", "cases"),
    [
        (block(SUM), ADD),
        (block(SUM, "py"), json.dumps(ADD)),
        (block("print(1)") + "\nno, better:\n" + block(SUM, ""), ADD),
        (block(SUM), {"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", ["7"]]}),
        (block(SUM_C, "c"), ADD),
        (block(SUM_CXX, "cpp"), ADD),
        (block(SORTED), FUNCTION),
        (block("print('noise')\n" + SORTED), FUNCTION),
        (block("class Solution:\n    def mid(self, values):\n        return sum(values) / len(values)"), FUNCTION),
        (block(SORTED), {"fn_name": "mid", "inputs": [[[4]]], "outputs": [4]}),
        (block("def pair(a):\n    return a, {1: {a}}"), ["assert pair(2) == (2, {1: {2}})"]),
        (block(TURN), {"fn_name": "f", "inputs": ['"abc"', ["abc"], {"s": "abc"}], "outputs": ['"cba"', "cba", "cba"]}),
        (block(TURN), {"fn_name": "f", "inputs": [["abc"]], "outputs": [["cba"]]}),
        (block("def f(s):\n    return s + [1]"), {"fn_name": "f", "inputs": ["[0]"], "outputs": ["[0, 1]"]}),
        (block("def f(t, d, *, s):\n    return t + (d[1],), s"), ["assert f((1,), {1: 'x'}, s=2) == ((1, 'x'), 2)"]),
        (block("print(1 / 3)"), [{"input": "", "output": "0.3333333"}]),
    ],
)  # fmt: skip
async def test_a_right_program_earns_everything(response: str, cases: Any) -> None:
    assert await judged(response, cases) == Score(1.0, {"passed": 1.0})


@pytest.mark.parametrize(
    ("response", "cases"),
    [
        ("", ADD),
        ("3", ADD),
        ("print(3)", ADD),
        (block("print(3)"), ADD),
        (block("print('3')\nimport sys; sys.exit(1)"), ADD[:1]),
        (block("while True: pass"), ADD[:1]),
        (block("import os, time\nwhile True: os.fork(); time.sleep(0.1)"), ADD[:1]),
        pytest.param(block("import os\nwhile True: os.fork()"), ADD[:1], marks=pytest.mark.faults),  # fills the process table
        (block("while True: print('3' * 999)"), ADD[:1]),
        (block("open('out', 'wb').write(bytes(10 ** 10))"), ADD[:1]),
        (block(SUM + "\nimport os; os.kill(os.getpid(), 9)"), ADD),
        (block("int main(void) {", "c"), ADD),
        (block(SUM, "rust"), ADD),
        (block("def mid(values): raise ValueError"), FUNCTION),
        (block("def other(values): return 2.0"), FUNCTION),
        (block("def mid(values): return '2.0'"), FUNCTION),
        (block("import os; os.write(1, b'true'); os._exit(0)"), FUNCTION),
        (block("x = []\nx.append(x)\ndef mid(values): return x"), FUNCTION),
        (block(SUM_C, "c"), FUNCTION),
    ],
)  # fmt: skip
async def test_anything_else_earns_nothing(response: str, cases: Any) -> None:
    assert (await judged(response, cases, case_s=3.0)).value == 0.0


async def test_a_program_that_finds_nothing_of_what_is_expected_cannot_forge_it() -> None:
    """All that the box holds, its input, its files and what else runs in it, is printed; no answer is among it."""
    look = (
        "import glob, os, sys\n"
        "for path in ['/proc/self/environ', *glob.glob('/proc/*/cmdline'), *glob.glob('/work/*'), *glob.glob('/tmp/*')]:\n"
        "    print(path, open(path, errors='replace').read(), file=sys.stderr)\n"
        "print(sys.stdin.read())"
    )
    cases = [{"input": "the question", "output": "the-secret-answer"}]
    reward = Code(CodeOptions(case_s=600.0))
    assert reward.needs_sandbox is not None
    sandbox = DirectSandbox(Catalogue.load().build(Chosen("sandbox", "bubblewrap"), Sandbox), reward.needs_sandbox)
    (case,) = read_cases("t", cases)
    async with sandbox.open() as box:
        assert await reward._prepared(box, "python", look)
        result = await box.run([box.python, "-I", "main.py"], case.stdin.encode())
        assert b"the question" in result.stdout and b"/work/main.py" in result.stderr
        assert b"the-secret-answer" not in result.stdout + result.stderr
        assert not await reward._right(box, "python", case)


async def test_a_share_of_the_cases_may_count() -> None:
    cases = [*ADD, {"input": "1 1", "output": "3"}]
    assert await judged(block(SUM), cases, mode="share") == Score(2 / 3, {"passed": 2 / 3})
    assert (await judged(block(SUM), cases)).value == 0.0
    assert (await judged(block(SUM), cases, max_cases=2)).value == 1.0


async def test_a_response_that_was_cut_off_earns_nothing_by_default() -> None:
    assert (await judged(block(SUM), outcome=Outcome.TRUNCATED)).value == 0.0
    assert (await judged(block(SUM), outcome=Outcome.TRUNCATED, truncated=True)).value == 1.0


@pytest.mark.parametrize(
    "cases",
    [
        None,
        [],
        "{",
        4,
        [{"input": "1"}],
        ["f(1) == 2"],
        ["assert f(x) == 2"],
        {"inputs": ["1"], "outputs": []},
        "[" * 99999,
    ],
)
def test_cases_that_cannot_be_read_name_the_task(cases: Any) -> None:
    with pytest.raises(ValueError, match="task t9"):
        read_cases("t9", cases)


def test_the_last_block_in_the_configured_language_is_the_program() -> None:
    response = block("one") + "\n" + block("two", "c") + "\n" + block("a table", "text")
    assert find_program(response, "auto") == ("c", "two\n")
    assert find_program(response, "python") == ("python", "one\n")
    assert find_program("no block", "auto") is None


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ("3\n", "3", True), (" 1  2\n3", "1 2 3\n", True), ("3.0000001", "3.0", True), ("3.1", "3.0", False),
        ("3.0", "3", True), ("10000000001", "10000000000", False), ("nan", "nan", True), ("nan", "1", False), ("", "", True),
        ("", "3", False), ("3 3", "3", False), ("inf", "1e999", False), ("yes", "Yes", False),
        ("9" * 400, "1.5", False),
    ],
)  # fmt: skip
def test_text_is_compared_word_by_word(answer: str, expected: str, same: bool) -> None:
    assert same_text(answer, expected, 1e-6) is same


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        (True, 1, False), (1, True, False), (1, 1.0, True), ([1, [2]], (1, (2,)), True), ([2, 1], {1, 2}, True),
        ([1, 1], {1, 2}, False), ({"1": [2]}, {1: (2,)}, True), ({"a": 1}, {"b": 1}, False), ("1", 1, False),
        (None, None, True), ([], None, False), (0.1 + 0.2, 0.3, True), (10**400, 1.5, False),
    ],
)  # fmt: skip
def test_values_are_compared_as_json(answer: Any, expected: Any, same: bool) -> None:
    assert same_value(answer, expected, 1e-6) is same
