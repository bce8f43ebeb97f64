# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of checks: a check yields findings, the same on each call, and changes no fact."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, get_args

from relax_core.api.checks import CheckFinding, CheckState, FirstStepFacts, PreflightFacts
from relax_core.api.plan import Plan
from relax_core.testing.suite import Suite

CONFIG: Mapping[str, Any] = {"model": {"path": "models/tiny"}, "data": {"train": "train.jsonl"}, "steps": 4}
PREFLIGHT = PreflightFacts(CONFIG, Plan("", (), (), {}, ()), 1 << 34)
FIRST_STEP = FirstStepFacts(CONFIG, {"reward/mean": 0.5, "reward/std": 0.5, "tokens/trained": 64.0}, {})


class CheckSuite(Suite):
    """The suite of a check; a subclass sets `component`, the check's function, and `facts` of the check's stage."""

    kind = "check"
    facts: ClassVar[PreflightFacts | FirstStepFacts] = FIRST_STEP
    test_options_round_trip = test_an_unknown_option_is_refused = None  # type: ignore[assignment]  # a function has none
    test_no_option_has_the_name_of_a_key_of_the_core = None  # type: ignore[assignment]

    @classmethod
    def target(cls) -> Any:
        """Return the check's function."""
        return cls.component if callable(cls.component) else super().target()

    @classmethod
    def make(cls) -> Any:
        return cls.target()

    @classmethod
    def exercise(cls, component: Any) -> Any:
        return [finding.plain() for finding in component(cls.facts)]

    def test_findings_are_complete_and_no_fact_is_changed(self, made: Any) -> None:
        before = copy.deepcopy(self.facts)
        findings = list(made(self.facts))
        assert self.facts == before, "the check changed its facts"
        for finding in findings:
            assert isinstance(finding, CheckFinding), "a check must yield CheckFindings"
            assert finding.name and finding.found, "name the statement, and say what was found"
            assert finding.state in get_args(CheckState)
            assert finding.advice or finding.state in ("ok", "not applicable"), f"{finding.name}: say what to do"
