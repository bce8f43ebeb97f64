# SPDX-License-Identifier: Apache-2.0
"""The graph over operations: what it refuses, what it selects, and that order follows columns."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from relax_core.api.errors import ConfigError
from relax_core.api.plan import Operation
from relax_core.control.planner import draw, mermaid, select


def operation(name: str, consumes: str = "", produces: str = "", row_filter: str = "", updates: str = "") -> Operation:
    role = name.partition(".")[0]
    columns = frozenset(consumes.split()), frozenset(produces.split())
    return Operation(name, role, *columns, updates=updates, row_filter=row_filter)


ROLLOUT = operation("rollout.generate", "", "tokens rewards")
REFERENCE = operation("reference.log_probs", "tokens", "ref")
CREDIT = operation("advantages.compute", "tokens rewards", "advantages returns")
FIT = operation("actor.fit", "tokens advantages", "", updates="actor")
ALL = [FIT, CREDIT, REFERENCE, ROLLOUT]


def names(*wanted: str, operations: list[Operation] = ALL) -> list[str]:
    return [one.name for one in select(operations, {"actor.fit": wanted})]


def test_only_what_is_needed_is_selected_and_producers_come_first() -> None:
    assert names() == ["rollout.generate", "advantages.compute", "actor.fit"]
    with_reference = names("ref")
    assert set(with_reference) == {one.name for one in ALL}
    assert with_reference.index("rollout.generate") < with_reference.index("reference.log_probs")


def test_the_goal_comes_after_every_column_it_waits_for() -> None:
    """However long the way to a column is that only the algorithm asks for."""
    chain = [operation("z.one", "advantages", "late"), operation("z.two", "late", "later")]
    assert names("later", operations=[*ALL, *chain])[-3:] == ["z.one", "z.two", "actor.fit"]


def test_a_column_that_nothing_produces_is_named_also_where_a_need_of_a_need_lacks_it() -> None:
    with pytest.raises(ConfigError, match=r"'values'; no installed role produces it"):
        names("values")
    with pytest.raises(ConfigError, match="'routed'"):
        names("ref", operations=[FIT, CREDIT, ROLLOUT, operation("reference.log_probs", "tokens routed", "ref")])


def test_a_cycle_is_refused_with_its_path() -> None:
    one, two = operation("a.x", "p", "q"), operation("b.y", "q", "p")
    with pytest.raises(ConfigError, match=r"cycle .*(a\.x -> b\.y|b\.y -> a\.x)"):
        names("q", operations=[*ALL, one, two])


def test_an_operation_may_read_what_it_also_writes() -> None:
    assert "a.x" in names("q", operations=[*ALL, operation("a.x", "tokens q", "q")])


@pytest.mark.parametrize(("first", "second"), [("", ""), ("domain=maths", ""), ("domain=maths", "domain=maths")])
def test_two_producers_of_one_column_need_disjoint_filters(first: str, second: str) -> None:
    teachers = [operation("a.x", "tokens", "teacher", first), operation("b.y", "tokens", "teacher", second)]
    with pytest.raises(
        ConfigError, match=r"a\.x and b\.y, which both produce 'teacher'; give them disjoint row filters"
    ):
        names("teacher", operations=[*ALL, *teachers])


def test_two_producers_with_disjoint_filters_both_run_before_the_consumer() -> None:
    teachers = [
        operation("a.x", "tokens", "teacher", "domain=maths"),
        operation("b.y", "tokens", "teacher", "domain=code"),
    ]
    chosen = names("teacher", operations=[*ALL, *teachers])
    assert {"a.x", "b.y"} < set(chosen) and chosen[-1] == "actor.fit"


def test_a_goal_that_no_role_offers_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'critic\.fit'"):
        select(ALL, {"critic.fit": ()})


@given(st.permutations(ALL))
def test_the_order_of_roles_does_not_matter_to_what_comes_before_what(operations: list[Operation]) -> None:
    ordered = select(operations, {"actor.fit": ["ref"]})
    have: set[str] = set()
    for one in ordered:
        assert one.consumes <= have
        have |= one.produces
    assert ordered == select(ALL, {"actor.fit": ["ref"]})


def test_drawings_name_every_operation_and_the_columns_between_them() -> None:
    ordered = select(ALL, {"actor.fit": ["ref"]})
    assert all(one.name in draw(ordered) for one in ordered)
    assert (
        "rollout_generate[rollout.generate] -- rewards, tokens --> advantages_compute[advantages.compute]"
        in mermaid(ordered)
    )
