# SPDX-License-Identifier: Apache-2.0
"""Calls are answered with documents, what is wrong with a call with a word, and a turn without one ends the sample."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from relax_plugin_search.environment import Search, SearchOptions

from relax_core.api import Action, Message, Observation, Step, Task, ToolCall

CORPUS = Path(__file__).with_name("documents.jsonl")


def play(*turns: list[dict[str, Any]], corpus: Path = CORPUS, **options: Any) -> list[Step]:
    """Play turns, each a list of the arguments of its calls."""

    async def played() -> list[Step]:
        environment = Search(SearchOptions(corpus=corpus, **options))
        environment.shared = await Search.open(environment.options)
        assert await environment.reset(Task("t", "?"), 0) is None
        calls = [tuple(ToolCall("search", arguments) for arguments in turn) for turn in turns]
        return [await environment.step(Action("Paris.", (), one)) for one in calls]

    return asyncio.run(played())


def said(step: Step) -> list[str]:
    assert isinstance(step.observation, Observation)
    assert all(
        isinstance(one, Message) and (one.role, one.name) == ("tool", "search") for one in step.observation.messages
    )
    return [message.text for message in step.observation.messages]


def test_a_search_shows_the_best_documents_and_an_answer_ends_the_sample() -> None:
    found, answered = play([{"query": "capital of Norway"}], [], top_k=2)
    assert said(found) == [
        "[1] Oslo\nOslo is the capital of Norway. It lies at the end of a fjord.\n\n[2] \nThe capital of France is Paris."
    ]
    assert (found.done, found.reward) == (False, None)
    assert (answered.observation, answered.done, answered.reward) == ("", True, None)
    assert answered.info == {"searches": 1}


def test_every_call_of_a_turn_is_answered() -> None:
    (found,) = play([{"query": "fjord"}, {"query": "France"}], top_k=1, template="{title}: {text}", max_chars=6)
    assert said(found) == ["Oslo: Oslo i...", ": The ca..."]
    assert found.info == {"searches": 2}


def test_documents_stand_apart_as_the_option_says() -> None:
    (found,) = play([{"query": "capital of Norway"}], top_k=2, template="{title}", separator=" / ")
    assert said(found) == ["Oslo / "]


@pytest.mark.parametrize("arguments", [{}, {"query": 3}, {"query": "a", "top_k": 9}])
def test_unknown_arguments_are_reported_and_do_not_search(arguments: dict[str, Any]) -> None:
    (told,) = play([arguments])
    assert said(told) == [f'search takes one argument, {{"query": text}}, and got {sorted(arguments)}.']
    assert (told.done, told.info) == (False, {"searches": 0})


def test_a_search_beyond_the_limit_is_refused() -> None:
    first, second = play([{"query": "rain"}, {"query": "rain"}], [{"query": "rain"}], max_searches=1)
    assert said(first)[1] == said(second)[0] == "No searches are left; answer with what was found."
    assert said(first)[0].startswith("[1] Bergen")
    assert not second.done and second.info == {"searches": 1}


def test_an_empty_result_is_reported_in_the_configured_words() -> None:
    (found,) = play([{"query": "of"}, {"query": "zebra"}], nothing="none", top_k=9)
    assert said(found)[1] == "none"
    assert said(found)[0].count("\n\n") == 2


def test_text_that_looks_like_a_placeholder_is_shown_unchanged(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"title": "{text}", "text": "{rank} of oak"}')
    (found,) = play([{"query": "oak"}], corpus=tmp_path / "corpus.jsonl")
    assert said(found) == ["[1] {text}\n{rank} of oak"]


def test_a_template_with_an_unknown_place_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"no placeholder \{score\}; the placeholders are rank, title, text"):
        SearchOptions(corpus=CORPUS, template="{score} {text}")
