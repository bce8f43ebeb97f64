# SPDX-License-Identifier: Apache-2.0
"""A second set of books beside the ledger: which attempts each surviving step trained, and which weights sampled what.

Trainers and engines of a simulated run report to the witness of their start, so that their content is compared with the
ledger's; it never looks at the code under test for what should be true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from relax_core.api.batch import AttemptId
from relax_core.api.weights import Version


@dataclass
class Witness:
    """What one start of a run has seen, and what the starts before it have left that a checkpoint covers.

    Invariants: `lineage` holds the steps that the present weights descend from; a (group, sample) is in one of them at most.
    """

    max_staleness: int
    masks: bool
    """Late tokens are masked instead of dropped: the lag of a sample says nothing, that of its trained tokens does."""
    lineage: dict[int, frozenset[AttemptId]] = field(default_factory=dict)
    """By the version that a step completed: every attempt it trained."""
    moving: dict[int, frozenset[AttemptId]] = field(default_factory=dict)
    """Those of them that had a gradient, and so must have reached the trainer."""
    begun: list[Version] = field(default_factory=list)
    """First version of each incarnation, in their order."""
    sampled: dict[AttemptId, frozenset[tuple[int, int]]] = field(default_factory=dict)
    """(incarnation, step) of the weights that really sampled the trained tokens of an attempt."""
    published: set[int] = field(default_factory=set)
    """Incarnations that weights were published under, in this start and in those before it."""
    problems: list[str] = field(default_factory=list)
    not_finite: int = 0
    """Updates that are to be NaN."""
    lies: list[str] = field(default_factory=list)
    """Falsehoods that the next engines to be asked will tell."""
    full: bool = False
    """The disk has no room."""

    def follow(self, version: Version) -> Witness:
        """Begin the books of a start that goes on at a version: later steps never were."""
        mine = {step: found for step, found in self.lineage.items() if step <= version.step}
        moving = {step: found for step, found in self.moving.items() if step <= version.step}
        return Witness(
            self.max_staleness, self.masks, mine, moving, [*self.begun, version], dict(self.sampled), set(self.published)
        )  # fmt: skip

    def survives(self, incarnation: int, step: int) -> bool:
        """Tell whether the present weights descend from these."""
        return all(incarnation >= first.incarnation or step <= first.step for first in self.begun)

    def wrong(self, what: str) -> None:
        self.problems.append(what)

    def rolled_back(self, version: Version) -> None:
        for book in (self.lineage, self.moving):
            for step in [step for step in book if step > version.step]:
                del book[step]
        self.begun.append(version)

    def trained(self, step: int, attempts: Iterable[AttemptId], moving: Iterable[AttemptId]) -> None:
        """Take one group of a step that is being committed; `step` is the version that it completes."""
        attempts = frozenset(attempts)
        before = {(one.group, one.sample): at for at, found in self.lineage.items() for one in found}
        for one in attempts:
            if (one.group, one.sample) in before:
                at = before[one.group, one.sample]
                self.wrong(f"sample {one.group}/{one.sample} is trained in step {step} and in step {at}")
            for incarnation, sampled in () if self.masks else self.sampled.get(one, ()):
                self.check_token(incarnation, sampled, step - 1)
        self.lineage[step] = self.lineage.get(step, frozenset()) | attempts
        self.moving[step] = self.moving.get(step, frozenset()) | frozenset(moving)

    def check_token(self, incarnation: int, sampled: int, version: int) -> None:
        """Check a token that the step which starts at `version` trains."""
        if not self.survives(incarnation, sampled):
            self.wrong(f"a token of abandoned weights {incarnation}.{sampled} is trained at version {version}")
        elif not 0 <= version - sampled <= self.max_staleness:
            self.wrong(f"a token of lag {version - sampled} is trained at version {version}")

    def check_weights(self, version: Version, content: Mapping[int, frozenset[AttemptId]]) -> None:
        """Check that weights are made of exactly the samples that the ledger says were trained up to them."""
        for step in range(1, version.step + 1):
            have, want = content.get(step, frozenset()), self.moving.get(step, frozenset())
            if have != want:
                extra, lacking = sorted(map(tuple, have - want)), sorted(map(tuple, want - have))
                self.wrong(f"weights {version}: step {step} has {extra} that were not committed and lacks {lacking}")
        if later := [step for step in content if step > version.step]:
            self.wrong(f"weights {version} hold steps {later}")


PRESENT: list[Witness] = []
"""The books of all starts of a schedule, the newest last."""
