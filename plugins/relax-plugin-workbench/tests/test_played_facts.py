# SPDX-License-Identifier: Apache-2.0
"""A row of `relax rollout` has the sample's facts, and its branches if there are several."""

from __future__ import annotations

from typing import Any, cast

from relax_plugin_workbench.try_run import played_facts

from relax_core.api.family import ModelFamily
from relax_core.api.trajectory import Node, Trajectory


class Letters:
    """A family whose tokens are letters."""

    def decode(self, tokens: tuple[int, ...]) -> str:
        return "".join(map(chr, tokens))


def given(parent: int | None, text: str) -> Node:
    return Node(parent, tuple(map(ord, text)), False)


def sampled(parent: int, text: str, turn: int) -> Node:
    return Node(parent, tuple(map(ord, text)), True, (-0.5,) * len(text), (1,) * len(text), turn)


def test_info_and_the_nodes_of_several_branches_are_part_of_a_row() -> None:
    family, line = cast(ModelFamily, Letters()), (given(None, "a?"), sampled(0, "b", 0))
    assert played_facts(Trajectory((), "b", line), family) == {}
    assert played_facts(Trajectory((), "b", line, info={"won": True}), family) == {"info": {"won": True}}
    for more in (sampled(0, "c", 1), given(None, "d?")):  # another answer, and another conversation
        facts: dict[str, Any] = played_facts(Trajectory((), "b", (*line, more), contexts=("main", "aide")), family)
        assert [node["text"] for node in facts["nodes"]] == ["a?", "b", family.decode(more.tokens)]
        assert [node["parent"] for node in facts["nodes"]] == [None, 0, more.parent]
        assert [node.get("context") for node in facts["nodes"]] == [None, "main", "aide" if more.sampled else None]
