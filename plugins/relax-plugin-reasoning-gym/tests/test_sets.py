# SPDX-License-Identifier: Apache-2.0
"""Every set of the installed reasoning-gym is sound, or barred for a fault that it has.

A new set is looked at as soon as it is installed, and one that was mended fails here until it is taken off the list.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS, has_curriculum
from relax_plugin_reasoning_gym.admission import ADMITTED
from relax_plugin_reasoning_gym.barred import BARRED
from relax_plugin_reasoning_gym.recipe import Recipe, entry, open_set, set_names
from relax_plugin_reasoning_gym.reward import answer_score

SETS = set_names()
USABLE = [name for name in SETS if name not in BARRED]
REFUSED = {"modulo_grid": "its own level 1 is one that its configuration refuses"}
TEXTS = (
    "", " ", "\n", ".", "-", "_", "'", '"', "%", ":::", ",,,,", "×", "->", "\x00", "٣", "²", "é∨∧", "0", "1", "-1", "2", "10",
    "0.0", "0/1", "1/0", "1e400", "nan", "inf", "1_000", "1.5.2", "9" * 5000, "1 " * 2000, "x" * 5000, "(" * 300, "[" * 3000,
    "{" * 500, "[]", "{}", "[[]]", "[0]", "()", '"a"', '{"a": 1}', "None", "null", "True", "False", "yes", "no", "A", "A B C",
    "A->B", "UDLR", "00:00", "2 days, 10:00", "infeasible", "I don't know", r"\boxed{}",
)  # fmt: skip
"""Answers that fit every task or none. One may be right for some, never for tasks with many different answers."""

WRONG: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "no idea at all": lambda made: "no idea at all",
    "the question": lambda made: made["question"],
    "prose": lambda made: "The answer is X",
    "an integral left as it is": lambda made: (
        f"Integral({made['metadata'].get('integrand', 'x')}, {made['metadata'].get('variable', 'x')})"
    ),
}
"""Answers that are wrong for every task, made from its entry."""


def faults(name: str, count: int, level: int | None = None) -> Iterator[str]:
    """Name what makes a set unfit for training, as far as `count` tasks of it show.

    Chance is allowed for where there are many: a puzzle has several solutions, and a question may begin with its answer.
    """
    recipes = [Recipe(name, 3 << 20, count, index, level) for index in range(count)]
    try:
        golds = [entry(recipe)["answer"] for recipe in recipes]
    except ValueError as error:
        yield str(error)
        return
    if None in golds:
        yield "no answer"
        return
    for recipe, gold in zip(recipes, golds, strict=True):
        if answer_score(recipe, gold) != 1.0:
            yield f"its own answer {gold!r} does not pay"
    for what, text in WRONG.items():
        paying = [recipe for recipe in recipes if answer_score(recipe, text(entry(recipe))) == 1.0]
        if len(paying) > count // 20:
            yield f"{what} pays for {len(paying)} tasks"
    for text in dict.fromkeys((*TEXTS, *golds)):
        paid = {gold for recipe, gold in zip(recipes, golds, strict=True) if answer_score(recipe, text) == 1.0}
        if len(paid) > max(2, count // 4):
            yield f"{text[:40]!r} pays for {len(paid)} different answers"


@pytest.fixture(scope="module")
def unstable() -> frozenset[str]:
    """Sets of which two processes make different tasks."""
    return changing(4)


def changing(count: int, names: Sequence[str] = ()) -> frozenset[str]:
    made = []
    for chance in (1, 2):
        command = [sys.executable, str(Path(__file__).with_name("digests.py")), str(count), str(chance), *names]
        env = {**os.environ, "PYTHONHASHSEED": str(chance)}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=600)
        made.append(json.loads(done.stdout.splitlines()[-1]))
    return frozenset(name for name in made[0] if made[0][name] != made[1][name])


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::SyntaxWarning")  # of rules, over texts that they can't read
@pytest.mark.parametrize("name", SETS)
def test_a_set_is_sound_or_barred_for_a_fault_that_it_has(name: str, unstable: frozenset[str]) -> None:
    fault = "other tasks in another process" if name in unstable else next(faults(name, 6), "")
    if name in BARRED:
        assert fault, "nothing is wrong with it any more: take it off the list"
    else:
        assert not fault


def test_no_barred_set_is_unknown() -> None:
    assert set(BARRED) | set(ADMITTED) <= set(SETS)
    assert len(USABLE) >= 90


@pytest.mark.parametrize("name", USABLE)
def test_text_of_the_policy_is_evaluated_only_where_it_was_admitted(name: str) -> None:
    source = inspect.getsource(inspect.getmodule(DATASETS[name][0]))  # type: ignore[arg-type]
    if re.search(r"\b(eval|exec|parse_expr|sympify)\(\s*answer", source):
        assert name in ADMITTED


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::SyntaxWarning")
@pytest.mark.parametrize("name", USABLE)
def test_no_fault_shows_in_more_tasks(name: str) -> None:
    assert list(faults(name, 24)) == []


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::SyntaxWarning")
@pytest.mark.parametrize("name", [name for name in USABLE if has_curriculum(name)])
def test_the_first_levels_of_a_curriculum_are_sound(name: str) -> None:
    for level in (0, 1):
        found = [fault for fault in faults(name, 4, level) if "refuses its options" not in fault]
        assert found == []
        if name not in REFUSED:
            open_set(Recipe(name, 3 << 20, 4, 0, level))


@pytest.mark.faults
def test_no_usable_set_changes_in_many_tasks() -> None:
    assert changing(40, USABLE) == frozenset()
