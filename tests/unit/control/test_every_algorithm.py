# SPDX-License-Identifier: Apache-2.0
"""The quickstart can be planned with every algorithm that is there, by its name alone."""

from __future__ import annotations

import pytest

from relax_core.api.algorithm import Source
from relax_core.control.prepare import plan_run
from relax_core.registry.catalogue import Catalogue

NAMES = Catalogue.load().names("algorithm")
FIRST = {Source.ROLLOUT: "rollout", Source.DATASET: "source", Source.PAIRS: "source"}
MORE = {"ppo": {"critic"}, "distillation": {"teacher"}, "dpo": {"reference"}}
"""Roles beside those that every algorithm of its source has."""


@pytest.mark.parametrize("name", NAMES)
def test_the_quickstart_plans_with_it(name: str) -> None:
    (stage,) = plan_run(["quickstart"], [f"algorithm={name}"]).stages
    made = stage.plan
    credited = {"advantages"} if made.source is Source.ROLLOUT else set()
    assert set(made.roles) == {FIRST[made.source], "actor", *credited, *MORE.get(name, set())}
