# SPDX-License-Identifier: Apache-2.0
"""Rows that training and evaluation share: equal after normalisation, or with a passage in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from relax_core.api.errors import ConfigError
from relax_core.api.task import Media, Message, Part, Task
from relax_core.data import overlap
from relax_core.data.overlap import EvalRows, RowContent, find_overlap, kept_apart, row_content, words

STORY = "a farmer has forty two red hens and sells half of them at the market on monday morning"
QUESTION = "how many hens has she left"


class Listed:
    """Tasks with plain prompts, named by their place."""

    def __init__(self, name: str, prompts: Sequence[str]) -> None:
        self._name, self._prompts = name, prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def content(self, index: int) -> RowContent:
        return row_content(Task(str(index), self._prompts[index]))

    def where(self, index: int) -> str:
        return f"{self._name}:{index + 1}"


def _found(train: Sequence[str], held: Sequence[str]) -> Any:
    sets = {"held": EvalRows(Listed("held", held), range(len(held)))}
    return find_overlap(Listed("train", train), range(len(train)), sets)


def _run(most: float = 1.0, *paths: str) -> Any:
    sets = tuple(SimpleNamespace(name=f"set{at}", path=Path(path)) for at, path in enumerate(paths))
    return SimpleNamespace(
        data=SimpleNamespace(train=Path("t")),
        eval=SimpleNamespace(size=1, max_overlap=most, sets=sets),
        rollout=SimpleNamespace(groups_per_step=2),
    )


def _key(prompt: Any, *written: str, whole: bool = False, **columns: Any) -> bytes:
    return row_content(Task("x", prompt, metadata=columns), written, whole).key


# -- normalisation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        "What is 2+2?", "what  is\n2 + 2 ?", "WHAT IS 2 + 2", "Ｗhat is ２＋２?", "What is 2\u00a0+\u200b2.",
        "what is 2 + 2:",
    ],
)  # fmt: skip
def test_case_space_width_and_marks_at_the_end_of_a_clause_do_not_distinguish_prompts(other: str) -> None:
    assert _key(other) == _key("What is 2 + 2?")


@pytest.mark.parametrize(
    ("one", "other"),
    [("12 + 7", "12 - 7"), ("12 * 7", "12 / 7"), ("([)]", "([])"), ("[1, 23]", "[12, 3]"), ("#.#.", "##.."),
     ("1.5", "15"), ("x = 3", "x != 3")],
)  # fmt: skip
def test_operators_brackets_and_pictures_of_marks_distinguish_prompts(one: str, other: str) -> None:
    assert _key(one) != _key(other)


def test_typographic_marks_equal_plain_ones_and_ideographs_are_words() -> None:
    assert words("It’s “so” – 5−3") == words('It\'s "so" - 5-3')
    assert words("小明有5个") == ["小", "明", "有", "5", "个"]


def test_a_chat_equals_its_plain_text_and_media_and_completions_distinguish_rows() -> None:
    def seen(source: str) -> tuple[Message, ...]:
        return (Message("user", (Part(media=Media("image", source)), Part("Which colour?"))),)

    assert _key("Which colour?") == _key((Message("user", "which colour"),))
    assert len({_key("Which colour?"), _key(seen("a.png")), _key(seen("b.png"))}) == 3
    assert _key("a", "b") == _key("A", "B.") != _key("a", "c")


def test_columns_distinguish_rows_only_of_environments_that_may_read_them() -> None:
    assert _key("play", seed=1) == _key("play", seed=2)
    assert _key("play", seed=1, whole=True) != _key("play", seed=2, whole=True)
    assert _key("play", seed=1, whole=True) == _key("Play", seed=1, whole=True)


# -- overlap ----------------------------------------------------------------------------------------------------------


def test_repeated_and_shared_rows_are_found_with_their_places() -> None:
    found = _found(["a b", "c", "A  b.", "d", "c"], ["x", "C", "a b", "a  B"])
    assert [(one.where, one.first) for one in found.repeated] == [("train:3", "train:1"), ("train:5", "train:2")]
    shared = found.sets["held"]
    places = [("held:2", "train:2"), ("held:3", "train:1"), ("held:4", "train:1")]
    assert [(one.where, one.first) for one in shared.equal] == places
    assert (shared.share, shared.similar, found.evaluated) == (0.75, (), {0, 1, 2, 4})


def test_prompts_that_share_a_run_of_words_are_found_with_the_run() -> None:
    train = ["what is this", f"Read: {STORY.upper()}. Explain it.", "nothing alike at all in here my friend, so go on"]
    found = _found(train, [f"{STORY}, {QUESTION}", QUESTION, " ".join(reversed(STORY.split()))]).sets["held"]
    (one,) = found.similar
    assert (one.where, one.first, one.passage) == ("held:1", "train:2", " ".join(STORY.split()[:13]))


def test_a_shorter_prompt_is_searched_whole_and_one_below_eight_words_is_not() -> None:
    eight, seven = "one two three four five six seven eight", "one two three four five six seven"
    assert len(_found([f"so {eight} and more of it", "", "", ""], [eight, seven]).sets["held"].similar) == 1
    assert not _found([f"so {seven} or more of it", "", "", ""], [eight, seven]).sets["held"].similar


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 30))
def test_any_shared_run_of_thirteen_words_is_found_and_a_shorter_one_is_not(before: int, after: int, size: int) -> None:
    shared = [f"s{at}" for at in range(size)]
    held = [f"h{at}" for at in range(before)] + shared + [f"i{at}" for at in range(20)]
    train = [f"t{at}" for at in range(after)] + shared + [f"u{at}" for at in range(20)]
    found = _found([" ".join(train), "q", "r", "s"], [" ".join(held)]).sets["held"]
    assert len(found.similar) == (size >= 13)


def test_a_phrase_of_a_template_counts_nothing_and_a_rare_run_beside_it_does() -> None:
    template = "Solve the following problem and put your final answer in a box at the end: "
    train = [f"{template}problem number {at}" for at in range(40)] + [f"{template}{STORY}"]
    found = _found(train, [f"{template}other", f"{template}{STORY} or not"]).sets["held"]
    assert [one.where for one in found.similar] == ["held:2"]


def test_a_long_prompt_is_searched_at_places_that_are_evenly_spread() -> None:
    book = [f"w{at}" for at in range(5000)]
    part = " ".join(book[2500:2560])
    assert len(_found([part, "", "", ""], [" ".join(book)]).sets["held"].similar) == 1


def test_a_run_searches_evenly_spread_rows_for_words_and_compares_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "MOST_SEARCHED", 4)
    prompts = [f"{STORY} {at}" if at in (1, 3) else f"p{at}" for at in range(10)]
    sets = {"set0": EvalRows(Listed("h", [f"{STORY} or not", "P9", "q"]), (0, 1, 2))}
    said = [text for _, text in kept_apart(_run(1.0, "h"), Listed("t", prompts), range(10), sets)[1]]
    assert "1 of 3 tasks are also in data.train: h:2 and t:10" in said[1]
    assert "searched in 4 of 10 rows" in said[0] and "h:1 and t:4" in said[2], "of rows 1, 4, 6 and 9 of the file"


# -- what a run does --------------------------------------------------------------------------------------------------


def test_rows_that_equal_a_held_out_row_are_not_trained() -> None:
    prompts = ["a", "b", "A.", "c", "b"]
    train, said = kept_apart(
        _run(), Listed("t", prompts), (1, 2, 3, 4), {"held-out": EvalRows(Listed("t", prompts), (0,))}
    )
    assert train == (1, 3, 4)
    assert any("1 rows equal a held-out row" in text for _, text in said)
    assert kept_apart(_run(), Listed("t", prompts), range(5), {}) == (range(5), [])
    assert kept_apart(_run(), Listed("t", prompts), (1, 2, 3, 4), {}) == ((1, 3, 4), []), "held out but not evaluated"
    sets = {"set0": EvalRows(Listed("h", ["c"]), (0,))}
    assert kept_apart(_run(1.0, "h"), Listed("t", prompts), (1, 2, 3, 4), sets)[0] == (1, 3, 4), "nor with other sets"
    with pytest.raises(ConfigError, match=r"eval\.size.*eval\.sets"):
        kept_apart(_run(), Listed("t", ["a", "a"]), (1,), {"held-out": EvalRows(Listed("t", ["a", "a"]), (0,))})


def test_a_hold_out_that_leaves_few_tasks_is_a_warning_with_the_numbers() -> None:
    prompts = ["a", "b", "a", "a", "c", "d"]
    for held, equal, left in (((0,), 2, 3), ((0, 1), 2, 2), ((1, 4, 5), 0, 3), ((0, 1, 4, 5), 0, 2)):
        rows = Listed("t", prompts if equal else [*"ebfgcd"])
        train = [index for index in range(6) if index not in held]
        kept, said = kept_apart(_run(), rows, train, {"held-out": EvalRows(rows, held)})
        warned = [text for level, text in said if level == "warning"]
        numbers = f"6 tasks: {len(held)} are held out, {equal} equal a held-out task, {left} remain to train on"
        assert (len(kept), [text.startswith(numbers) for text in warned]) == (left, [True] * (left < 3))


def test_rows_without_repetition_are_trained_as_before() -> None:
    rows = Listed("t", [f"p{at}" for at in range(9)])
    train = (0, 2, 3, 5, 7)
    assert kept_apart(_run(), rows, train, {"held-out": EvalRows(rows, (1, 4))}) == (train, [])


def test_a_set_in_the_training_file_is_reported_and_refused_above_the_limit() -> None:
    rows, sets = Listed("t", ["a", "b"]), {"set0": EvalRows(Listed("h", ["A", "c"]), (0, 1))}
    train, said = kept_apart(_run(0.5, "h"), rows, (0, 1), sets)
    assert (train, said) == ((0, 1), [("warning", "eval set set0: 1 of 2 tasks are also in data.train: h:1 and t:1")])
    assert kept_apart(_run(0.5, "t"), rows, (0, 1), sets)[1][0][0] == "info", "the set is the training file itself"
    with pytest.raises(ConfigError, match=r"eval\.sets\.0\.path: got 1 of 2 tasks.*h:1 and t:1.*max_overlap = 0\.4"):
        kept_apart(_run(0.4, "h"), rows, (0, 1), sets)


def test_a_set_apart_from_the_training_file_is_said_to_be_so() -> None:
    sets = {"set0": EvalRows(Listed("h", ["c", "d"]), (0, 1))}
    said = kept_apart(_run(0.0, "h"), Listed("t", ["a", "b"]), (0, 1), sets)[1]
    assert said == [("info", "eval set set0: 0 of 2 tasks are also in data.train")]
