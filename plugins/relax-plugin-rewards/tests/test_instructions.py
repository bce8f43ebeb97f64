# SPDX-License-Identifier: Apache-2.0
"""Each check on a response that follows it and on some that nearly do; rows as public data sets have them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies
from relax_plugin_rewards.instruction_checks import CHECKS
from relax_plugin_rewards.instructions import Instructions, InstructionsOptions, instructions_of, names
from relax_plugin_rewards.segmentation import sentences

from relax_core.api import Task
from relax_core.testing.samples import trajectory

FOLLOWED: list[tuple[str, dict[str, Any], str, tuple[str, ...]]] = [
    ("keywords:existence", {"keywords": ["sea", "sky"]}, "Sky over seas", ("the sea",)),
    ("keywords:forbidden_words", {"forbidden_words": ["art", "c++"]}, "a party", ("Art!", "in C++ now")),
    ("keywords:frequency", {"keyword": "a.b", "frequency": 2, "relation": "at least"}, "a.b A.B", ("a.b axb",)),
    ("keywords:word_count_different_numbers", {"keyword": "x", "frequency": 2, "relation": "less than"}, "x", ("x x",)),
    ("keywords:word_once", {"keyword": "sea"}, "the sea", ("sea sea", "sky")),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, "## x", ("# x",)),
    ("letters:letter_counting", {"N": 3, "relation": "at least"}, "a b c", ("a b 1 2",)),
    ("keywords:keyword_specific_position", {"keyword": "sea", "n": 2, "m": 3}, "Hi. By the sea!", ("By the sea.",)),
    ("words:nth_word", {"n": 2, "word": "sea"}, "The *Sea*, calm", ("sea the", "The")),
    ("keywords:palindrome", {}, "on the level", ("a bb no", "12321")),
    ("keywords:start_end", {}, "Sea and sea.", ("sea", "sea and sky")),
    ("keywords:no_adjacent_consecutive", {}, "big elephants", ("a big one",)),
    ("count:count_unique", {}, "each word once", ("The sea the sky",)),
    ("length_constraints:number_words", {"num_words": 3.0, "relation": "exactly"}, "one, two three", ("one two",)),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"}, "Mr. A. B. Ok!", ("So. b. C!",)),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", ("a\n\nb", "a***b***c", "a\n***\n***\nb")),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, "***a***", ("***",)),
    (
        "length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "sea"},
        'a\n\n"Sea" it is', ("sea\n\nb", "a\n\nsea\n\nc", "sea"),
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [place]", ("[name] []",)),
    (
        "detectable_content:postscript", {"postscript_marker": "P.S."},
        "Hi\n\n**P.S.** more", ("Hi P.S. x", "Hi\nP.P.S x", "Hi\nP.S."),
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Hi\nP. P. S. more", ("Hi\nP.S. x",)),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- **b**\n* * *\n*c*\n---", ("* a", "* a\n* b\n* c")),
    ("detectable_format:constrained_response", {}, "My answer is yes.", ("Yes.", "My answer is yes. My answer is no.")),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b c**", ("*a* ** **", "**a**")),
    (
        "detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2", ("Section 1",),
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', ("5", "{", '{"a": 1} Sure!', "[" * 99999)),
    ("detectable_format:title", {}, "<<sea>>\nwaves", ("<< >>", "<<a\nb>>", "<sea>")),
    ("detectable_format:square_brackets", {}, "[the] [sea]", ("[the] sea", "[the sea]")),
    ("combination:two_responses", {}, "a\n******\nb", ("a ****** a", "a", "a****** ******b", "a******b******c")),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why?"}, "why? Since", ("Since you ask: why?",)),
    ("first_word:first_word_answer", {"first_word": "sea"}, "Sea, calm", ("The sea",)),
    ("first_word:first_word_sent", {"first_word": "sea"}, "Sea. Sea is calm.", ("Sea. The sky.", "!!")),
    ("last_word:last_word_answer", {"last_word": "sea"}, "the Sea!", ("sea sky",)),
    ("last_word:last_word_sent", {"last_word": "sea"}, "By sea. On sea!", ("By sea. By air.", "!!")),
    ("startend:starts_with", {"start_phrase": "My dear"}, '"my dear sea"', ("Oh my dear",)),
    ("startend:end_checker", {"end_phrase": "The end."}, 'So. *the end.*', ("The end. Or not", "The end")),
    ("startend:quotation", {}, ' "sea\nsky" ', ('"', '""', '"sea', "'sea'")),
    ("punctuation:no_comma", {}, "sea; sky", ("sea, sky", "sea\uff0csky")),
    ("punctuation:punctuation_dot", {}, "sea", ("sea.",)),
    ("punctuation:punctuation_exclamation", {}, "sea.", ("sea!",)),
    ("change_case:english_capital", {}, "THE SEA 1", ("The SEA", "123", "\u041c\u041e\u0420\u0415")),
    ("change_case:english_lowercase", {}, "the sea 1", ("The sea", "123")),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at most"}, "SEA SKY x", ("A B C",)),
    ("change_case:alternating_case", {}, "ThE sEa 1", ("THe sea", "1 2")),
    ("count:lowercase_counting", {"N": 1}, "THE Sea is", ("the sea",)),
    ("language:response_language", {"language": "hi"}, "\u0928\u092e\u0938\u094d\u0924\u0947 (hi)", ("namaste", "123")),
    ("language:response_language", {"language": "ja"}, "\u6d77\u306f\u9752\u3044", ("\u6d77", "sea")),
    ("language:response_language", {"language": "zh"}, "\u5927\u6d77", ("\u6d77\u306f", "sea")),
    ("language:response_language", {"language": "EN"}, "the sea", ("\u043c\u043e\u0440\u0435",)),
]  # fmt: skip


def task(*instructions: dict[str, Any]) -> Task:
    return Task("t1", "?", None, {"instructions": list(instructions)})


def score(task: Task, response: str, **options: Any) -> float:
    return Instructions(InstructionsOptions(**options)).score(task, trajectory(task, response)).value


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), FOLLOWED)
def test_a_check_distinguishes_right_from_nearly_right(
    name: str, arguments: dict[str, Any], right: str, wrong: tuple[str, ...]
) -> None:
    own = task({"name": name, "arguments": arguments})
    assert score(own, right) == 1.0
    assert [score(own, response) for response in ("", " \n", *wrong)] == [0.0] * (len(wrong) + 2)


def test_every_check_is_shown_above_and_its_short_name_is_its_own() -> None:
    assert {name for name, *_ in FOLLOWED} == set(CHECKS)
    assert len(names()) == 2 * len(CHECKS)


@given(strategies.text(alphabet='aA1 .,*-[]<>"#\n`{}P\u6d77'))
def test_every_check_gives_an_answer_to_anything(response: str) -> None:
    for name, arguments, _, _ in FOLLOWED:
        assert isinstance(CHECKS[name][0](response or "x", **_valid(name, arguments)), bool)


def _valid(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    (instruction,) = instructions_of(task({"name": name, "arguments": arguments}), "instructions")
    return dict(instruction.arguments)


TWO = {"name": "number_words", "arguments": {"num_words": 2, "relation": "exactly"}}
QUIET = {"name": "punctuation:no_comma", "arguments": {}}


def test_all_instructions_or_their_share_can_count() -> None:
    assert score(task(TWO, QUIET), "a b c") == 0.0
    assert score(task(TWO, QUIET), "a b c", mode="share") == 0.5
    assert score(task(TWO, QUIET), "a b") == score(task(TWO, QUIET), "a b", mode="share") == 1.0


@pytest.mark.parametrize("response", ["Sure!\na b", "a b\nHope that helps!", "Sure!\n**a b**\nBye, now!"])
def test_loosely_the_frame_of_chat_is_taken_off(response: str) -> None:
    assert score(task(TWO, QUIET), response) == 0.0
    assert score(task(TWO, QUIET), response, loose=True) == 1.0


def test_loosely_nothing_is_not_followed() -> None:
    assert score(task(QUIET), "a, b", loose=True) == 0.0


@pytest.mark.parametrize(
    "columns",
    [
        {
            "instruction_id_list": ["length_constraints:number_words"],
            "kwargs": [{"num_words": 2, "relation": "exactly", "letter": None}],
        },
        {"instructions": '[{"name": "number_words", "arguments": {"num_words": 2, "relation": "exactly"}}]'},
        {
            "instructions": "[{'instruction_id': ['number_words', 'no_comma'], "
            "'kwargs': [{'num_words': 2, 'relation': 'exactly'}, None]}]"
        },
        {"instructions": {"name": "number_words", "arguments": '{"num_words": 2, "relation": "exactly"}'}},
    ],
)
def test_rows_of_public_data_sets_are_read(columns: dict[str, Any]) -> None:
    row = Task("t1", "?", None, columns)
    assert score(row, "a b") == 1.0
    assert score(row, "a b c") == 0.0


def test_another_column_may_hold_them() -> None:
    row = Task("t1", "?", "[{'instruction_id': ['no_comma'], 'kwargs': [None]}]")
    assert score(row, "a b", column="answer") == 1.0


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({}, "task t1 has no instructions"),
        ({"instructions": []}, "task t1 has no instructions"),
        ({"instructions": "be nice"}, "task t1: column 'instructions' is 'be nice'"),
        ({"instructions": ["no_comma"]}, "task t1: column 'instructions' has 'no_comma'"),
        ({"instructions": [{"name": "be_nice"}]}, "task t1: no check is named 'be_nice'"),
        ({"instructions": [{"arguments": {}}]}, "task t1: no check is named None"),
        ({"instructions": [{"name": "number_words"}]}, "task t1: instruction number_words: num_words: Field required"),
        ({"instructions": [{**TWO, "arguments": {"num_words": 2, "relation": "around"}}]}, "number_words: relation"),
        ({"instructions": [{**TWO, "arguments": {"num_words": -1, "relation": "exactly"}}]}, "number_words: num_words"),
        ({"instructions": [{**QUIET, "arguments": {"num_words": 2}}]}, "no_comma: num_words: Extra inputs"),
        ({"instructions": [{**QUIET, "arguments": [2]}]}, "instruction punctuation:no_comma has arguments"),
        ({"instructions": [{"name": "existence", "arguments": {"keywords": [" "]}}]}, "existence: keywords.0"),
        (
            {"instructions": [{"name": "response_language", "arguments": {"language": "xx"}}]},
            "language 'xx' is unknown",
        ),
        ({"instruction_id_list": ["no_comma"], "kwargs": [{}, {}]}, "1 instructions have 2 sets of arguments"),
    ],
)
def test_an_unjudgeable_instruction_is_the_tasks_fault_for_any_response(columns: dict[str, Any], said: str) -> None:
    for response in ("", "a b"):
        with pytest.raises(ValueError, match=said):
            score(Task("t1", "?", None, columns), response)
    with pytest.raises(ValueError, match=said):
        Instructions().gold(Task("t1", "?", None, columns))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One. Two! Three?", 3),
        ("Dr. Smith paid 3.50 dollars, e.g. for tea... He left.", 2),
        ('"Why?" he asked. "No."', 2),
        ("no capitals. none at all.", 2),
        ("Title\n\nText without end", 2),
        ("\u4f60\u597d\u3002\u518d\u89c1\uff01", 2),
        ("...", 0),
        ("", 0),
    ],
)
def test_sentences_end_where_readers_see_it(text: str, found: int) -> None:
    assert len(sentences(text)) == found
