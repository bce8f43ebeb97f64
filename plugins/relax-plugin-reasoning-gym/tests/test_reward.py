# SPDX-License-Identifier: Apache-2.0
"""Responses as models write them: where the answer is found, what counts as right, and whose fault a failure is."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from relax_plugin_reasoning_gym import recipe as recipes, reward as rewards
from relax_plugin_reasoning_gym.admission import ADMITTED, is_inert
from relax_plugin_reasoning_gym.recipe import Recipe, entry
from relax_plugin_reasoning_gym.reward import ReasoningGymReward, ReasoningGymRewardOptions, answer_score, extract

from relax_core.api import Outcome, Task, Trajectory


def task(name: str, index: int = 0) -> Task:
    recipe = Recipe(name, 7, 4, index)
    made = entry(recipe)
    return Task("t1", made["question"], made["answer"], {"set": name, "recipe": recipe.as_column()})


def score(asked: Task, response: str, outcome: Outcome = Outcome.FINISHED, **options: Any) -> float:
    reward = ReasoningGymReward(ReasoningGymRewardOptions(**options))
    return reward.score(asked, Trajectory((), response, (), outcome))


@pytest.mark.parametrize(
    ("response", "form", "answer"),
    [
        ("<answer>7</answer>", "tags", "7"),
        ("<think><answer>6</answer></think> so <answer>\n 7 \n</answer>.", "tags", "7"),
        ("<answer>no, <answer>7</answer>", "tags", "7"),
        ("<answer>7</answer></answer>", "tags", "7"),
        ("<answer>7", "tags", None),
        ("7</answer>", "tags", None),
        ("7", "tags", None),
        (r"first \boxed{6}, then \boxed {7}", "boxed", "7"),
        (r"\boxed{\frac{1}{\boxed{2}}}", "boxed", r"\frac{1}{\boxed{2}}"),
        (r"\boxed{6} and \boxed{7", "boxed", "6"),
        (r"\boxed{1 \boxed{2}", "boxed", "2"),
        ("7", "boxed", None),
        ("I think\n 7 \n\n", "last-line", "7"),
        (" \n", "last-line", None),
        (" 7 8\n", "whole", "7 8"),
        ("", "whole", None),
    ],
)
def test_the_answer_is_read_from_the_configured_place(response: str, form: Any, answer: str | None) -> None:
    assert extract(response, form) == answer


@given(st.text(alphabet=r"\boxed{}<answer>/ 7") | st.text(), st.sampled_from(["tags", "boxed", "last-line", "whole"]))
def test_an_answer_is_a_piece_of_its_response(response: str, form: Any) -> None:
    answer = extract(response, form)
    assert answer is None or (answer in response and answer == answer.strip())


def test_many_open_boxes_are_read_in_one_pass() -> None:
    assert extract(r"\boxed{" * 100_000, "boxed") is None


@pytest.mark.parametrize(
    ("response", "options", "value"),
    [
        ("<answer>156</answer>", {}, 1.0),
        ("<answer>+0,156.0</answer>", {}, 1.0),
        ("156", {}, 0.0),
        ("156", {"answer": "whole"}, 1.0),
        ("<answer>The answer is 156</answer>", {}, 0.0),
        ("<answer>The answer is 156</answer>", {"partial": True}, 3 / 17),
        ("The answer is 156", {"partial": True}, 0.0),
    ],
)
def test_only_a_full_score_counts_unless_parts_do(response: str, options: dict[str, Any], value: float) -> None:
    assert score(task("chain_sum"), response, **options) == pytest.approx(value)


def test_a_response_cut_off_scores_zero_by_default() -> None:
    asked = task("chain_sum")
    assert score(asked, "<answer>156</answer>", Outcome.TRUNCATED) == 0.0
    assert score(asked, "<answer>156</answer>", Outcome.TRUNCATED, truncated=True) == 1.0


@pytest.mark.parametrize(
    ("columns", "answer", "said"),
    [
        ({"recipe": None}, "156", "must be a recipe of the source"),
        ({"recipe": {"set": "chain_sum"}}, "156", "must be a recipe of the source"),
        ({}, "157", "task t1 can't be judged: its recipe generates the answer '156' here"),
        ({}, None, "task t1 can't be judged"),
    ],
)
def test_a_task_that_is_not_what_its_recipe_makes_is_an_error(columns: dict[str, Any], answer: Any, said: str) -> None:
    asked = task("chain_sum")
    with pytest.raises(ValueError, match=said):
        score(Task("t1", asked.prompt, answer, {**asked.metadata, **columns}), "<answer>156</answer>")


def test_a_set_that_refuses_its_own_answer_is_an_error_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = task("chain_sum", index=3)
    monkeypatch.setattr(rewards, "set_score", lambda recipe, answer: 0.0)
    with pytest.raises(ValueError, match="does not accept its own answer"):
        score(asked, "<answer>1</answer>")


@pytest.mark.parametrize(("told", "value"), [(float("nan"), 0.0), (-1.0, 0.0), (1.0000000000000002, 1.0), (0.5, 0.5)])
def test_a_score_out_of_bounds_is_brought_back(monkeypatch: pytest.MonkeyPatch, told: float, value: float) -> None:
    monkeypatch.setattr(rewards, "set_score", lambda recipe, answer: told)
    assert answer_score(Recipe("chain_sum", 7, 4, 0), "1") == value


@pytest.mark.parametrize("failure", [MemoryError, ImportError, OSError])
def test_a_failure_of_the_machine_does_not_score_zero(
    monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    def fail(recipe: Recipe, answer: str) -> float:
        raise failure

    monkeypatch.setattr(rewards, "set_score", fail)
    with pytest.raises(failure):
        answer_score(Recipe("chain_sum", 7, 4, 0), "1")


@pytest.mark.parametrize(
    "name", ["binary_matrix", "countdown", "n_queens", "simple_integration", "spiral_matrix", "string_insertion"]
)
@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').abort()", "[[0 for x in 'aaaaaaaa'] for y in 'aaaaaaaa']", "().__class__.__base__.__subclasses__()",
        "9**9**9**9", "'a' * 9999999999", "Integral(x, x)",
    ],
)  # fmt: skip
def test_a_program_is_wrong_and_never_run(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setattr(recipes, "_dataset", lambda recipe: pytest.fail("the rule was asked"))
    assert answer_score(Recipe(name, 7, 4, 0), text) == 0.0


@given(st.text(alphabet="ab01[](),'\"{}:.-*+_ \n=") | st.text())
@example("-" * 20_000 + "1")
@example("[" * 20_000)
@example(" 1")
@example("\x00")
def test_a_text_that_is_inert_has_no_call_and_no_operation(text: str) -> None:
    if is_inert(text):
        try:
            tree = ast.parse(text.lstrip(" \t"), mode="eval")
        except (SyntaxError, ValueError):
            return
        allowed = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.expr_context)
        numbers = (ast.UnaryOp, ast.BinOp, ast.USub, ast.UAdd, ast.Add, ast.Sub)  # -1 and 1+2j are literals
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
        assert not calls
        assert all(isinstance(node, (*allowed, *numbers, ast.Call)) for node in ast.walk(tree))


@pytest.mark.parametrize(
    ("text", "admitted"),
    [
        ("-x**9 + 7*x**7 + 9*x**4/2 + C", True),
        ("2.5*x ** 2 - .5*(x + 1.)", True),
        ("x**100", False),
        ("x**2**2", False),
        ("2.n(9)", False),
        ("sin(x)", False),
        ("'x'", False),
        ("1" * 5000 + "!", False),
        ("x*" * 5000 + "!", False),
    ],
)
def test_a_polynomial_is_admitted_and_nothing_that_names_or_computes_more(text: str, admitted: bool) -> None:
    assert ADMITTED["simple_integration"](text) is admitted


@pytest.mark.parametrize("name", sorted(ADMITTED))
def test_answers_as_people_write_them_are_admitted(name: str) -> None:
    for index in range(4):
        asked = task(name, index)
        assert score(asked, f"<answer> {asked.answer}\n</answer>") == 1.0


@given(
    st.sampled_from(["chain_sum", "prime_factorization", "game_of_life", "complex_arithmetic", "sokoban", "syllogism"]),
    st.text(),
)
def test_no_text_raises_and_every_score_is_in_bounds(name: str, text: str) -> None:
    assert 0.0 <= score(task(name), f"<answer>{text}</answer>", partial=True) <= 1.0
