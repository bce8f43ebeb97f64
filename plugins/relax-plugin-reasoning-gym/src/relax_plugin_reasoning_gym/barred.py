# SPDX-License-Identifier: Apache-2.0
"""The sets of reasoning-gym that are unsuitable for training, each with the reason.

These sets let a policy exploit a faulty rule, or make a resumed run continue with different tasks. The task source
refuses barred sets unless `allow_barred` is set. For every set of the installed version, the tests show that the set is
sound or that its fault is still present.
"""

from __future__ import annotations

from collections.abc import Mapping

_NO_ANSWER = "its tasks come without an answer, so no test can show that its rule accepts a right answer"
_OTHER_TASKS = "a seed gives different tasks in each process, so a resumed run would continue with different tasks"

BARRED: Mapping[str, str] = {
    "boxnet": _NO_ANSWER,
    "codeio": "it executes programs from its data to make tasks, and a seed gives different tasks in each process",
    "coin_flip": "a prefix of the right answer gets the full score: 0 is accepted for every probability below 1",
    "composite": "it combines several sets: list these sets instead",
    "game_of_life_halting": "every text that is not empty counts as the answer True",
    "graph_color": _NO_ANSWER,
    "intermediate_integration": "the question written as Integral(...) gets the full score, and answers some tasks",
    "isomorphic_strings": _OTHER_TASKS,
    "knight_swap": _OTHER_TASKS,
    "polynomial_multiplication": _OTHER_TASKS,
    "propositional_logic": _NO_ANSWER,
    "puzzle24": "any four numbers that make 24 get the full score, even if the task gives different numbers",
    "ransom_note": _OTHER_TASKS,
    "rubiks_cube": _NO_ANSWER,
    "rush_hour": _NO_ANSWER,
    "word_ladder": _OTHER_TASKS,
}
