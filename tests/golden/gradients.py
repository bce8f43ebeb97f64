# SPDX-License-Identifier: Apache-2.0
"""Every algorithm's gradient beside GRPO's, on one shared batch in float64; `python -m tests.golden.gradients` records it.

The batch: groups of four whose rewards have several levels, one sample in two rows, one without verdict, one group all
equal; log-probs of the policy that sampled, of the step's start, the reference and a teacher, a critic's values, a greedy
answer. `on_policy` sets the first two to the policy's own, so that every ratio is 1.
"""

import json
import math
import random
from pathlib import Path

from relax_core.api import RowId
from tests.golden.bench import CATALOGUE, build, cosine, credited, draw_groups, flat, learnt, rows_of

FILE = Path(__file__).parents[2] / "docs" / "recorded" / "gradients.json"
SEED, GROUPS, MEMBERS = 7, 8, 4
OTHER_OUTPUT = {"reward-model"}
"""Trains a reward of the last token, and no log-probs: there is nothing to compare."""
NAMES = [name for name in CATALOGUE.names("algorithm") if name not in {"grpo", *OTHER_OUTPUT}]
SAME_ON_POLICY = {"gspo", "sapo"}
"""GRPO's advantages and aggregation, and a ratio that is 1: its level and its bound do not act."""


def shared(on_policy):
    """The groups, and a teacher of every row."""
    groups, source = draw_groups(SEED, GROUPS, MEMBERS), random.Random("teacher")
    for member in (member for group in groups for member in group):
        member["greedy"] = 0.75
    for row in (row for group in groups for member in group for row in member["rows"]):
        row["teacher"] = [min(x + source.gauss(0, 0.5), -0.01) for x in row["log_probs"]]
        if on_policy:
            row["old"] = row["rollout"] = list(row["log_probs"])
    return groups


def direction(name, on_policy):
    """[row][token] d loss / d log_prob, of all rows that can be trained."""
    algorithm, groups = build(name), shared(on_policy)
    if algorithm.source == "pairs":
        return _of_pairs(algorithm, groups)
    credit = credited(algorithm, groups) if algorithm.source == "rollout" else [[0.0] * len(group) for group in groups]
    return learnt(algorithm, rows_of(groups, credit))[1]


def _of_pairs(algorithm, groups):
    """The best and the worst sample of each group that has both, by their first rows; other rows have no gradient."""
    rows = rows_of(groups, [[member["reward"] for member in group] for group in groups])
    slopes = {row["id"]: [0.0] * len(row["mask"]) for row in rows}
    pairs = []
    for number in range(len(groups)):
        own = sorted((row for row in rows if row["sample"][0] == number and row["id"].row == 0), key=_reward)
        if _reward(own[0]) < _reward(own[-1]):
            pairs += [(own[-1], RowId(number, 0, 0, 0)), (own[0], RowId(number, 1, 0, 0))]
    found = learnt(algorithm, [{**row, "id": place} for row, place in pairs])[1]
    return list((slopes | {row["id"]: slope for (row, _), slope in zip(pairs, found, strict=True)}).values())


def _reward(row):
    return row["advantage"][0]


def beside(name):
    """Cosine with GRPO's, and the length of the difference by GRPO's length; with ratios off 1 and all 1."""
    told = {}
    for key, on_policy in (("off_policy", False), ("on_policy", True)):
        own, grpo = direction(name, on_policy), direction("grpo", on_policy)
        apart = math.dist(flat(own), flat(grpo)) / math.hypot(*flat(grpo))
        told[key] = {"cosine": round(cosine(own, grpo), 6), "difference": round(apart, 6)}
    return told


def table():
    return {name: beside(name) for name in NAMES}


if __name__ == "__main__":
    FILE.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")
