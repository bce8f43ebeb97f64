# SPDX-License-Identifier: Apache-2.0
"""The sets of reasoning-gym that are no good for training, each with the reason.

A policy that is rewarded by one of them learns its fault, or a resumed run goes on with other tasks. The source refuses them
unless `allow_barred` is set. Tests show of every set of the installed version that it is sound or that its fault is there.
"""

from __future__ import annotations

from collections.abc import Mapping

_NO_ANSWER = "its tasks come without an answer, so nothing shows that its rule can be met"
_OTHER_TASKS = "one seed gives other tasks in another process, so that a resumed run would not go on with its own"

BARRED: Mapping[str, str] = {
    "boxnet": _NO_ANSWER,
    "codeio": "it executes the programs of its data to make tasks, and one seed gives other tasks in another process",
    "coin_flip": "an answer that begins the right one pays in full: 0 is right for every probability below 1",
    "composite": "it is made of other sets: list them here instead",
    "game_of_life_halting": "every text that is not empty counts as the answer True",
    "graph_color": _NO_ANSWER,
    "intermediate_integration": "the question written as Integral(...) pays in full, and is the answer of some tasks",
    "isomorphic_strings": _OTHER_TASKS,
    "knight_swap": _OTHER_TASKS,
    "polynomial_multiplication": _OTHER_TASKS,
    "propositional_logic": _NO_ANSWER,
    "puzzle24": "any four numbers that make 24 pay in full, whatever numbers the task gives",
    "ransom_note": _OTHER_TASKS,
    "rubiks_cube": _NO_ANSWER,
    "rush_hour": _NO_ANSWER,
    "word_ladder": _OTHER_TASKS,
}
