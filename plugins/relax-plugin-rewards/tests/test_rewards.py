# SPDX-License-Identifier: Apache-2.0
"""Tricky answers, written as people and models write them."""

from __future__ import annotations

import threading

import pytest
from relax_plugin_rewards.exact import Exact, ExactOptions
from relax_plugin_rewards.maths import Maths, MathsOptions

from relax_core.api import Message, Task, Trajectory


def said(response: str) -> Trajectory:
    return Trajectory((Message("user", "?"), Message("assistant", response)), response, ())


def maths(answer: object, response: str, **options: object) -> float:
    return Maths(MathsOptions(**options)).score(Task("t1", "?", answer), said(response))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("42", "Adding them up gives 42."),
        (42, "42"),
        (0.5, r"$\frac12$"),
        ("1/2", r"so \boxed{\frac{1}{2}}"),
        ("1/2", "The answer is 0.5"),
        ("1/3", "about 0.333333"),
        ("42", "It is 43, no: 42"),
        ("1000", "$1{,}000$"),
        ("1e3", "1000"),
        ("2.5e-3", "0.0025"),
        ("{1,2}", r"$\{2,1\}$"),
        (r"2\sqrt{2}", r"$\sqrt{8}$"),
        ("5", "$x=5$"),
        ("2", r"\boxed{2}, though at first I had 3"),
    ],
)
def test_equal_however_written(answer: object, response: str) -> None:
    assert maths(answer, response) == 1.0


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("42", "42 was my first thought, but it is 43"),
        ("(1,2)", "$(2,1)$"),
        ("9007199254740993", "9007199254740992"),
        ("42", ""),
        ("42", "no idea"),
        ("12", r"\frac{ {{{ \boxed{"),
        ("1/3", "0.33"),
    ],
)
def test_different_or_unreadable_is_zero(answer: str, response: str) -> None:
    assert maths(answer, response) == 0.0


@pytest.mark.parametrize("answer", ["no number here", "", None, "???"])
def test_an_answer_column_that_is_not_mathematics_is_the_tasks_fault(answer: object) -> None:
    with pytest.raises(ValueError, match="t1"):
        maths(answer, "42")


def test_boxed_only_wants_a_box() -> None:
    assert maths("42", "it is 42", boxed_only=True) == 0.0
    assert maths("42", r"it is \boxed{42}, not 43", boxed_only=True) == 1.0


def test_precision_is_an_option() -> None:
    assert maths("3.14159", "3.14", precision=2) == 1.0
    assert maths("3.14159", "3.14") == 0.0


def test_the_reward_works_outside_the_main_thread() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(maths("1/2", r"\boxed{\frac{1}{2}}")))
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.parametrize(
    ("answer", "response", "value"),
    [
        ("0137", "0137", 1.0),
        (137, "137", 1.0),
        (137, "137.0", 1.0),
        ("137", "137.0", 0.0),
        ("0137", "137", 0.0),
        ("a", "a ", 0.0),
    ],
)
def test_exact_is_the_whole_response(answer: object, response: str, value: float) -> None:
    assert Exact().score(Task("t", "?", answer), said(response)) == value


def test_exact_strips_only_if_configured() -> None:
    assert Exact(ExactOptions(strip=True)).score(Task("t", "?", "a"), said(" a\n")) == 1.0
