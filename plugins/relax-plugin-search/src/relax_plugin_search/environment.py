# SPDX-License-Identifier: Apache-2.0
"""The environment `search`: the policy can search a file of documents before it answers.

Calls of the tool `search` return documents. The first turn without a call is the answer, which the run's `[[rewards]]`
judge. The result of a wrong call is an error text, from which the policy can learn.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from relax_core.api import Action, Environment, Message, Observation, Options, Step, Task, Tool, ToolCall
from relax_plugin_search.index import Document, Index, read_documents

PLACES = ("rank", "title", "text")
_PLACE = re.compile(r"\{(\w+)\}")


class SearchOptions(Options):
    """Options of `search`."""

    corpus: Path
    """JSON lines file of documents, `{"text": ..., "title": ...}`; the title is optional."""
    top_k: int = Field(3, ge=1)
    """Maximum number of documents that a search returns."""
    max_chars: int = Field(2000, ge=1)
    """Maximum number of characters of a document's text; a longer text is cut and ends with `...`."""
    max_searches: int = Field(0, ge=0)
    """Maximum number of searches in a sample; the result of a later call is an error text. 0: no limit except
    `rollout.max_turns`."""
    template: str = "[{rank}] {title}\n{text}"
    """Template of a document in an observation. Placeholders: `{rank}` from 1, `{title}`, `{text}`."""
    separator: str = "\n\n"
    """Text between two documents in an observation."""
    nothing: str = "Nothing was found."
    """Result of a search if no document contains a word of the query."""

    @field_validator("template")
    @classmethod
    def _known_places(cls, template: str) -> str:
        if wrong := [place for place in _PLACE.findall(template) if place not in PLACES]:
            raise ValueError(f"template has no placeholder {{{wrong[0]}}}; the placeholders are {', '.join(PLACES)}")
        return template


class Search(Environment[SearchOptions]):
    """One sample: `search` calls, then an answer.

    reset -> (turn with calls -> documents) ... -> turn without calls
    """

    tools: ClassVar[tuple[Tool, ...]] = (
        Tool("search", {"query": str}, "Search the documents; returns the passages that fit the query best."),
    )
    shared: Index

    @classmethod
    async def open(cls, options: SearchOptions) -> Index:
        """Read and index the corpus; called once per worker."""
        return Index(read_documents(options.corpus))

    async def reset(self, task: Task, seed: int) -> Observation | None:
        self._searches = 0
        return None

    async def step(self, action: Action) -> Step:
        if not action.tool_calls:
            return Step("", done=True, info={"searches": self._searches})
        answers = tuple(Message("tool", self._answer(call), name=call.name) for call in action.tool_calls)
        return Step(Observation(messages=answers), done=False, info={"searches": self._searches})

    def _answer(self, call: ToolCall) -> str:
        query: Any = call.arguments.get("query")
        if not isinstance(query, str) or set(call.arguments) != {"query"}:
            return f'search takes one argument, {{"query": text}}, and got {sorted(call.arguments)}.'
        if self.options.max_searches and self._searches >= self.options.max_searches:
            return "No searches are left; answer with what was found."
        self._searches += 1
        found = self.shared.search(query, self.options.top_k)
        return self.options.separator.join(map(self._shown, found, range(1, len(found) + 1))) or self.options.nothing

    def _shown(self, document: Document, rank: int) -> str:
        text = document.text
        if len(text) > self.options.max_chars:
            text = f"{text[: self.options.max_chars].rstrip()}..."
        values = {"rank": str(rank), "title": document.title, "text": text}
        return _PLACE.sub(lambda place: values[place[1]], self.options.template).strip()
