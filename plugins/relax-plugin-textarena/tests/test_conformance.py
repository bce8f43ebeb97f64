# SPDX-License-Identifier: Apache-2.0
"""Both environments keep what every environment promises, with each sort of opponent that needs no engine."""

from __future__ import annotations

import pytest
import textarena  # noqa: F401 (the suites' processes are forked with the slow modules that this process has)

from relax_core.api import Task
from relax_core.testing.environment import EnvironmentSuite

pytestmark = pytest.mark.one_process("exercises")


class Suite(EnvironmentSuite):
    slow_modules = ("numpy", "textarena")


class TestTextArena(Suite):
    component = "textarena"
    tasks = (
        Task("one", "Win the game."),
        Task("two", "Win the game.", metadata={"textarena": {"id": "KuhnPoker-v0", "seed": 3, "seat": 1}}),
        Task("three", "Win the game.", metadata={"textarena": {"id": "Snake-v0", "seats": 4}}),
        Task("alone", "Win the game.", metadata={"textarena": {"id": "Sokoban-v0", "kwargs": {"max_turns": 3}}}),
    )
    turns = ("[0]", "[1]", "[check]", "[up]", "nothing", "[8]", "[left]", "[bet]", "[4]") * 2


class TestReplies(Suite):
    component = "textarena"
    options = {
        "id": "IteratedPrisonersDilemma-v0", "opponent": "replies", "replies": ["Let us agree.", "[Cooperate]"],
        "kwargs": {"num_rounds": 2}, "after": "</think>", "seed_of": "task",
    }  # fmt: skip
    tasks = (Task("one", "Play."), Task("two", "Play."))
    turns = ("</think> Yes.", "<think>[Cooperate]</think>[Defect]", "Yes.", "</think>[Defect]", "</think>[Defect]")


class TestTeam(Suite):
    component = "textarena-team"
    options = {
        "id": "Taboo-v0-animals", "opponent": "replies", "replies": ["a thing", "[cow]"], "max_turns": 12,
        "kwargs": {"max_rounds": 1},
    }  # fmt: skip
    tasks = (Task("one", "Play."), Task("two", "Play."))
    turns = ("a clue", "[dog]", "another", "[cat]")
