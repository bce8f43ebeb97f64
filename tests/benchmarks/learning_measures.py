# SPDX-License-Identifier: Apache-2.0
"""By what the benchmark of learning judges an algorithm, and what it sets for one beside its name."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Records = Sequence[Mapping[str, float]]
ENDS = 10
"""Steps at either end of a run, of a measure that every step tells."""


@dataclass(frozen=True)
class Measure:
    """A metric of a run, before and after it, and the metric that is drawn along it."""

    name: str
    key: str
    drawn: str
    falls: bool = False
    every_step: bool = False

    def ends(self, records: Records) -> tuple[float, float]:
        """Before and after."""
        told = [record[self.key] for record in records if self.key in record]
        size = ENDS if self.every_step else 1
        if len(told) < 2 * size:
            raise RuntimeError(f"{self.key} was told {len(told)} times; it takes {2 * size}")
        return statistics.fmean(told[:size]), statistics.fmean(told[-size:])

    def curve(self, records: Records) -> list[float]:
        return [record[self.drawn] for record in records if self.drawn in record]


REWARD = Measure("held-out reward", "eval/held-out/mean", "reward/mean")
MEASURES: Mapping[str, Measure] = {
    "gigpo": Measure("games won", "eval/all/mean", "reward/mean"),
    "distillation": Measure("KL to the teacher", "distill/kl", "distill/kl", falls=True, every_step=True),
    "sft": Measure("held-out loss", "eval/held-out/loss", "train/loss", falls=True),
    "dpo": Measure("held-out margin", "eval/held-out/margin", "pairs/margin"),
    "reward-model": Measure("held-out loss", "eval/held-out/loss", "train/loss", falls=True),
}
"""Of those that do not learn from rewards, or on another task."""
TASKS: Mapping[str, str] = {"gigpo": "guess-number"}
"""Recipes of those for which an answer of one turn is no test."""

SAME_DIGITS = Path(__file__).with_name("same_digits.py")
SETTINGS: Mapping[str, Sequence[str]] = {
    "gigpo": ("eval.samples=64",),
    "grpo": ("algorithm.aggregation=sequence",),
    "gdpo": (
        f'plugins=["{SAME_DIGITS}"]',
        'rewards=[{name="exact"}, {name="same-digits", weight=0}]',
        "algorithm.weights={same-digits=1}",
    ),
}
"""What an algorithm needs beside its name. The recipe's own setting of GRPO is not its default; GDPO learns from several
rewards, of which the first alone is the held-out one."""
SHOWN: Mapping[str, str] = {
    "gigpo": "a game of four turns",
    "grpo": "",
    "gdpo": "a second reward: the right digits in any order",
}
"""In words, where the settings are not a reader's."""


def setting(algorithm: str, steps: int, usual: int, more: Sequence[str]) -> str:
    """In what a row's runs differ from the others'."""
    own = SHOWN.get(algorithm, ", ".join(SETTINGS.get(algorithm, ())))
    return ", ".join(part for part in (f"{steps} steps" if steps != usual else "", own, *more) if part)
