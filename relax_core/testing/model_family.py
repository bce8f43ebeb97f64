# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of model families: valid token ids, and deltas that leave sampled tokens unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from relax_core.api.family import Rendered
from relax_core.api.task import Message
from relax_core.testing.suite import Suite

ASKED = (Message("user", "What is 2 + 2?"),)
SAID = Message("assistant", "4")
NEXT = (Message("user", "And 3 + 3?"),)


class ModelFamilySuite(Suite):
    """The suite of a family; a subclass sets `component` and a `[model]` table; a small local tokenizer is enough."""

    kind = "model-family"
    model: ClassVar[Mapping[str, Any]] = {}
    text: ClassVar[str] = "What is 2 + 2?"
    """Text that the tokenizer can encode and decode without a change."""

    @classmethod
    def open(cls, component: Any) -> Any:
        """Open the component with the suite's `[model]` table; return the component."""
        if not cls.model:
            raise NotImplementedError("the suite has no model; set `model`, a [model] table, in it")
        component.open(cls.model)
        return component

    @classmethod
    def exercise(cls, component: Any) -> Any:
        family = cls.open(component)
        parts = (family.start(ASKED), family.delta((*ASKED, SAID), NEXT), family.start(cls.text))
        return [[list(part.tokens), list(part.media)] for part in parts]

    @pytest.fixture
    def family(self, made: Any) -> Any:
        return self.open(made)

    def test_ids_are_of_its_vocabulary(self, family: Any) -> None:
        for rendered in (family.start(ASKED), family.start(self.text), family.delta((*ASKED, SAID), NEXT)):
            assert isinstance(rendered, Rendered), (
                f"got a {type(rendered).__name__}; start() and delta() must return Rendered"
            )
            assert rendered.tokens and all(0 <= token < family.vocab_size for token in rendered.tokens)

    def test_text_is_written_back_as_it_was(self, family: Any) -> None:
        assert family.decode(family.encode(self.text)) == self.text

    def test_a_delta_holds_what_is_appended_and_nothing_before_it(self, family: Any) -> None:
        delta = family.decode(family.delta((*ASKED, SAID), NEXT).tokens)
        assert NEXT[0].text in delta and ASKED[0].text not in delta

    def test_a_delta_does_not_depend_on_what_was_sampled(self, family: Any) -> None:
        other = Message("assistant", "Something else entirely.")
        assert family.delta((*ASKED, SAID), NEXT) == family.delta((*ASKED, other), NEXT)

    def test_turns_end_with_a_stop_token(self, family: Any) -> None:
        stops = family.stop_tokens
        assert stops and all(0 <= token < family.vocab_size for token in stops)

    def test_plain_text_has_no_tool_calls(self, family: Any) -> None:
        assert family.parse(family.encode(self.text)) == (self.text, (), "")
