# SPDX-License-Identifier: Apache-2.0
"""Garbage is collected seldom while roles work, and as before when the last one has ended, in whatever order they end."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from relax_core.runners import context
from relax_core.runners.context import SELDOM, collected_seldom


class Loop:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the suite has frozen is thawed meanwhile."""
    monkeypatch.setattr(context, "freezes", True)
    gc.unfreeze()
    yield
    gc.freeze()


def test_while_roles_work_older_objects_are_left_alone_and_the_last_role_leaves_the_process_as_it_was() -> None:
    """A collection searches all modules of the suite, so that one test looks at everything."""
    before = gc.get_threshold()
    first, second = ExitStack(), ExitStack()
    earlier = Loop()
    old = weakref.ref(earlier)
    first.enter_context(collected_seldom())
    second.enter_context(collected_seldom())
    del earlier
    new = weakref.ref(Loop())
    gc.collect()
    assert new() is None and old() is not None, "new cycles are collected, and older ones are frozen"
    first.close()
    assert gc.get_threshold() == SELDOM
    second.close()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
    gc.disable()
    try:
        with collected_seldom():
            assert old() is None, "the next start collects what an earlier one left"
    finally:
        gc.enable()


def test_a_process_that_freezes_by_itself_is_left_its_frozen_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "freezes", False)
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collected_seldom():
        left = Loop()
        old = weakref.ref(left)
        del left
        gc.collect()
        assert old() is None
        assert gc.get_threshold() == SELDOM
    assert gc.get_freeze_count() > frozen // 2, "other threads may free some of them meanwhile"
