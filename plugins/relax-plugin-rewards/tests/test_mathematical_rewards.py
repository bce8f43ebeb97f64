# SPDX-License-Identifier: Apache-2.0
"""The rewards of public recipes for mathematics, on answers that others judge wrongly."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from relax_plugin_rewards.dapo import Dapo, DapoOptions
from relax_plugin_rewards.deepscaler import DeepScaler, DeepScalerOptions
from relax_plugin_rewards.geo3k import Geo3k, Geo3kOptions
from relax_plugin_rewards.openr1mm import OpenR1MM, OpenR1MMOptions

from relax_core.api import Score, Task
from relax_core.testing.samples import trajectory


def deepscaler(answer: object, response: str, **options: object) -> float:
    task = Task("t1", "?", answer)
    return DeepScaler(DeepScalerOptions(**options)).score(task, trajectory(task, response))  # type: ignore[arg-type]


def dapo(answer: object, response: str, **options: object) -> float:
    task = Task("t1", "?", answer)
    return Dapo(DapoOptions(**options)).score(task, trajectory(task, response)).value  # type: ignore[arg-type]


def openr1mm(answer: object, response: str, **options: object) -> Score:
    task = Task("t1", "?", answer)
    return OpenR1MM(OpenR1MMOptions(**options)).score(task, trajectory(task, response))  # type: ignore[arg-type]


def geo3k(answer: object, response: str, **options: object) -> Score:
    task = Task("t1", "?", answer)
    return Geo3k(Geo3kOptions(**options)).score(task, trajectory(task, response))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("1/2", r"\boxed{\frac{2}{4}}"),
        (4, r"so \boxed{3}? No: \fbox{4}"),
        (r"\boxed{4}", r"<think>\boxed{5}</think> \boxed{4}"),
        ("12", r"$\boxed{12\text{ cm}}$"),
        (r"4\sqrt{2}", r"\boxed{\sqrt{32}}"),
        (r"\text{Evelyn}", r"\boxed{Evelyn}"),
        ("A", r"\boxed{\text{A}}"),
        (["1/2", "2"], r"\boxed{2}"),
        ("50%", r"\boxed{50\%}"),
        ("0.5", r"\boxed{50\%}"),
        (r"2^{3^{2}}", r"\boxed{2^{3^{2}}}"),
        ("1,000", r"\boxed{1{,}000}"),
        (r"\frac{2^{100}}{3^{100}}", r"\boxed{\left(\frac{2}{3}\right)^{100}}"),
        ("120", r"\boxed{5!}"),
        (r"\frac{(n+1)!}{2}", r"\boxed{\frac{1}{2} (n+1)!}"),
    ],
)
def test_deepscaler_pays_for_the_last_box_however_written(answer: object, response: str) -> None:
    assert deepscaler(answer, response) == 1.0


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("12", ""),
        ("12", "12"),
        ("12", r"\boxed{12 or 13}"),
        ("12", r"\boxed{12} \boxed{13}"),
        ("12", r"\boxed{12}, no, \boxed{13"),
        ("12", r"<think>\boxed{12}</think> It is 13."),
        ("12", r"<think>\boxed{12}"),
        ("5", r"\boxed{the answer is 5}"),
        ("5", r"\boxed{5, not 6}"),
        ("5", r"\boxed{9^{9^9}}"),
        ("5", r"\boxed{123456789012345678901234567890!}"),
        ("5", r"\boxed{\int_0^\infty e^{-x^{x}} dx}"),
        ("x^2-1", r"\boxed{(x-1)^{1000}}"),
        ("5", "\\boxed{" + "(" * 400 + ")" * 400 + "}"),
    ],
)
def test_deepscaler_pays_nothing_else_and_takes_no_minutes(answer: object, response: str) -> None:
    assert deepscaler(answer, response) == 0.0


def test_deepscaler_may_require_a_thought_or_read_it() -> None:
    assert deepscaler("4", r"\boxed{4}", think="required") == 0.0
    assert deepscaler("4", r"...</think>\boxed{4}", think="required") == 1.0
    assert deepscaler("4", r"<think>\boxed{4}</think>", think="ignored") == 1.0


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("1/2", "Answer: 0.5"),
        ("1/2", r"Answer: $\dfrac{2}{4}$"),
        ("12.0", "Answer: 12"),
        ("1000", r"Answer: 1,000"),
        ("-3/4", r"Answer: -\frac{3}{4}"),
        ("7", r"**Answer:** \boxed{7}"),
        ("7", "Answer: x = 7."),
        ("7", "Answer: 3. That was too quick: I forgot a case.\n\nAnswer: 7"),
        ("7", "Answer: 7\nAnswer: 7.0"),
        ("7", "the final answer:\n7"),
        ("12", "Answer: 12 cm"),
        ("12", r"Answer: 12^\circ"),
        ("banana", "Answer: a banana"),
        ("man", r"Answer: \text{man}"),
        (["7", "8"], "Answer: 8"),
        ("10" * 40, "Answer: " + "10" * 40),
    ],
)
def test_dapo_pays_for_the_last_answer_line(answer: object, response: str) -> None:
    assert dapo(answer, response) == 1.0


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("12", ""),
        ("12", "12"),
        ("12", "Answer:"),
        ("12", "Answer: 12 or 13"),
        ("12", "Answer: 7\nAnswer: 12"),
        ("12", "Answer: 12. But no, I was wrong.\nAnswer: 13"),
        ("12", "Answer: 12\n" + "and so on " * 40),
        ("man", "Answer: mn"),
        ("1/2", r"Answer: \frac{1}{0}"),
        ("9007199254740993", "Answer: 9007199254740992"),
    ],
)
def test_dapo_pays_its_least_for_everything_else(answer: object, response: str) -> None:
    assert dapo(answer, response) == -1.0


def test_dapo_strictly_wants_a_box_and_no_other_words() -> None:
    assert dapo("12", "Answer: 12", strict_box=True) == -1.0
    assert dapo("12", r"\boxed{12}", strict_box=True) == 1.0
    assert dapo("12.0", r"\boxed{12}", strict_box=True) == 1.0
    assert dapo("12", r"\boxed{12 cm}", strict_box=True) == -1.0


def test_dapos_values_are_options() -> None:
    assert dapo("1", "Answer: 1", right=2.0, wrong=0.0) == 2.0
    assert dapo("1", "", right=2.0, wrong=0.0) == 0.0
    with pytest.raises(ValidationError):
        DapoOptions(right=0.0, wrong=0.0)


@pytest.mark.parametrize(
    ("answer", "response", "accuracy", "well_formed"),
    [
        ("1/2", "<think>so</think><answer>0.5</answer>", 1.0, 1.0),
        ("1/2", "<think>so\nso</think>\n<answer>\n\\boxed{0.5}\n</answer>\n", 1.0, 1.0),
        ("x<3", r"<think>so</think><answer>(-\infty,3)</answer>", 1.0, 1.0),
        ("B", "<think>so</think><answer>B</answer>", 1.0, 1.0),
        ("<answer>B</answer>", "<answer>B</answer>", 1.0, 0.0),
        ("B", "<think>so</think><answer>A</answer>", 0.0, 1.0),
        ("B", "<think>so</think><answer>B</answer> Sure.", 1.0, 0.0),
        ("B", "<answer>B</answer><think>so</think>", 1.0, 0.0),
        ("B", "<think>so</think><answer>A</answer><answer>B</answer>", 0.0, 0.0),
        ("B", "<think></think><answer>B</answer>", 1.0, 0.0),
        ("B", "any text that ends in >", 0.0, 0.0),
        ("B", "B", 0.0, 0.0),
    ],
)
def test_openr1mm_has_two_parts(answer: object, response: str, accuracy: float, well_formed: float) -> None:
    score = openr1mm(answer, response, format_weight=0.25)
    assert score == Score(0.75 * accuracy + 0.25 * well_formed, {"accuracy": accuracy, "format": well_formed})


@pytest.mark.parametrize(
    ("answer", "response", "accuracy"),
    [
        ("20.5", r"\boxed{20.5}", 1.0),
        (r"2 \sqrt { 221 }", r"\boxed{29.732}", 1.0),
        ("29.73", r"\boxed{2\sqrt{221}}", 1.0),
        ("45", r"\boxed{45^\circ}", 1.0),
        ("20.5", r"\boxed{20.52}", 1.0),
        ("20.5", r"\boxed{20.6}", 0.0),
        ("2000", r"\boxed{2001}", 0.0),
        ("0", r"\boxed{0.0001}", 0.0),
        ("5", "5", 0.0),
        ("5", r"\boxed{5 or 6}", 0.0),
        ("5", r"\boxed{9^{9^9}}", 0.0),
    ],
)
def test_geo3k_takes_a_number_near_enough(answer: object, response: str, accuracy: float) -> None:
    assert geo3k(answer, response) == Score(0.9 * accuracy, {"accuracy": accuracy, "format": 0.0})


def test_geo3k_pays_for_a_thought_before_a_box() -> None:
    assert geo3k("5", r"<think>so</think> \boxed{6}").value == pytest.approx(0.1)
    assert geo3k("5", r"<think>so</think> \boxed{5}").value == 1.0
    assert geo3k("5", r"<think>so</think> 5").value == 0.0
    assert geo3k("5", r"<think>so \boxed{5}").value == 0.0
    assert geo3k("20.5", r"\boxed{20}", tolerance=0.05).parts["accuracy"] == 1.0


def test_geo3k_refuses_a_gold_answer_that_is_not_a_number() -> None:
    with pytest.raises(ValueError, match="task t1: answer 'nothing' is not a mathematical expression"):
        geo3k("nothing", "5")
