# SPDX-License-Identifier: Apache-2.0
"""The media store's budget: what a live group needs is never deleted, what goes is what was used longest ago, and no more of it
than the budget asks."""

from __future__ import annotations

import numpy as np
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from relax_plugin_media.pipeline import MediaBudget

from relax_core.api.modality import PlaceholderSpan, ProcessedMedia
from relax_core.media.store import MediaStore

from .test_media_pipeline import pipeline, rendered, said

KEYS = st.sampled_from([f"{number:032x}" for number in range(12)])


class Needs(RuleBasedStateMachine):
    """The budget beside a plain model: who holds what, written down."""

    @initialize(limit=st.integers(0, 60), found=st.dictionaries(KEYS, st.integers(1, 20)), known=st.integers(0, 5))
    def begin(self, limit, found, known):
        self.limit, self.there, self.used = limit, dict(found), list(found)
        self.budget = MediaBudget(limit, found, known)
        self.oldest, self.next = 0, known
        self.held = {(known - 1, key) for key in found} if known else set()

    @rule(key=KEYS, size=st.integers(1, 20), transient=st.booleans())
    def see(self, key, size, transient):
        """A new group, or somebody who lets go himself, is shown a medium."""
        size = self.there.setdefault(key, size)
        self.budget.add(key, size)
        owner = f"eval {self.next}" if transient else self.next
        self.next += not transient
        self.budget.retain(owner, key)
        self.held.add((owner, key))
        self.used = [one for one in self.used if one != key] + [key]
        self._delete()

    @rule(data=st.data())
    def end(self, data):
        """The bus needs nothing older, or somebody lets go."""
        others = sorted({owner for owner, _ in self.held if isinstance(owner, str)})
        if others and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(others))
            self.budget.release(gone)
            self.held = {(owner, key) for owner, key in self.held if owner != gone}
        else:
            self.oldest = data.draw(st.integers(self.oldest, max(self.oldest, self.next)))
            self.budget.release_below(self.oldest)
            self.held = {(owner, key) for owner, key in self.held if isinstance(owner, str) or owner >= self.oldest}
        self._delete()

    def _delete(self):
        needed = {key for _, key in self.held}
        free = [key for key in self.used if key in self.there and key not in needed]
        gone = self.budget.evicted()
        assert gone == free[: len(gone)], "not what was used longest ago"
        if gone:
            assert sum(self.there.values()) - sum(self.there[key] for key in gone[:-1]) > self.limit, (
                "more than it had to"
            )
        for key in gone:
            del self.there[key]
        assert sum(self.there.values()) <= self.limit or needed >= set(self.there), "over its budget for no need"

    @invariant()
    def a_needed_medium_is_there(self):
        if hasattr(self, "budget"):
            assert {key for _, key in self.held} <= set(self.there)
            assert {key: self.budget.size_of(key) for key in self.used} == {**dict.fromkeys(self.used), **self.there}


TestNeeds = Needs.TestCase
TestNeeds.settings = settings(max_examples=40, stateful_step_count=30)


async def test_media_over_the_budget_go_and_come_back_when_they_are_needed(tmp_path):
    words = [f"data:,word{number:04}" for number in range(6)]
    async with pipeline(tmp_path, limit_bytes=3 * 200) as (made, log):
        store = MediaStore(tmp_path / "media")
        for group, word in enumerate(words):
            await made.prepare([said(word)], group)
            assert set(_keys(made, words[: group + 1])) <= set(store.found()), "a live group's medium is gone"
        made.release_below(4)
        assert set(_keys(made, words[4:])) <= set(store.found()) and store.size_bytes() <= 600
        assert len(log.read_text().split()) == 6
        await made.prepare([said(words[0])], 6)
        assert len(log.read_text().split()) == 7
        (key,) = _keys(made, words[:1])
        assert store.get(key).tensors["x"].tobytes() == b"word0000"


def _keys(made, words):
    return [made.fill_placeholders(rendered([said(word)]), [said(word)]).media[0] for word in words]


async def test_released_media_are_deleted_and_earlier_media_stay_until_old_groups_end(tmp_path):
    old = MediaStore(tmp_path / "media")
    old.put(ProcessedMedia("ab" * 16, {"x": np.zeros(500, np.uint8)}, 1, (PlaceholderSpan("image", 1),)))
    async with pipeline(tmp_path, limit_bytes=100, known_groups=3) as (made, _):
        await made.prepare([said("data:,abc")], "eval")
        assert len(old.found()) == 2
        made.release("eval")
        assert list(old.found()) == ["ab" * 16]
        made.release_below(2)
        assert list(old.found()) == ["ab" * 16]
        made.release_below(3)
        assert old.found() == {}


async def test_the_size_of_media_is_read_from_their_headers(tmp_path):
    async with pipeline(tmp_path) as (made, log):
        assert await made.num_features([said("data:,abc", "data:,de")]) == 2
        assert log.read_text() == "", "something was decoded"
        await made.prepare([said("data:,abc")])
        assert await made.num_features([said("data:,abc")]) == 3


async def test_the_memory_of_sources_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_plugin_media.pipeline.REMEMBERED", 3)
    long = ["data:," + f"{number}" * 5000 for number in range(6)]
    async with pipeline(tmp_path, limit_bytes=1 << 30) as (made, log):
        for group, word in enumerate(long):
            await made.prepare([said(word)], group)
        assert len(made._known) == 3 and sum(map(len, made._names.values())) == 3
        assert all(len(repr(name)) < 500 for name in made._known)
        await made.prepare([said(long[0])], 6)
        assert len(log.read_text().split()) == 6, "the same bytes are processed once"
        assert _keys(made, long[-2:]) == _keys(made, long[-2:])
