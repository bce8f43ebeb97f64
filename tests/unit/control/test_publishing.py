# SPDX-License-Identifier: Apache-2.0
"""The form in which trained adapters reach the engines, and why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_core.config.tables import CriticTable, Lora, ModelTable, ReferenceTable
from relax_core.registry.catalogue import Catalogue
from relax_core.roles.rank_group import _model
from tests.unit.control.conftest import planned

PLAIN_ENGINE = """
from relax_core.api import Capabilities, Engine

class Plain(Engine):
    capabilities = Capabilities(transports=frozenset({"shared-memory"}))
    async def start(self, spec): ...
    def generate(self, requests): ...
    async def update_weights(self, manifest, transport): ...
    async def health(self): ...
    async def stop(self): ...
"""


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    path = tmp_path_factory.mktemp("script") / "plain.py"
    path.write_text(PLAIN_ENGINE)
    return Catalogue.load([str(path)])


@pytest.mark.parametrize(("overrides", "alone", "says"), [
    ((), False, ""),
    (("model.lora.rank=8",), True, "adapters are published alone"),
    (("model.lora.dora=true",), False, "folded into the weights for every publish (full): model.lora.dora"),
    (('model.lora.modules_to_save=["lm_head"]',), False, "model.lora.modules_to_save are trained whole"),
    (("model.lora.rank=8", "engine=plain"), False, "engine plain takes no adapters"),
])  # fmt: skip
def test_the_plan_says_how_adapters_travel(
    catalogue: Catalogue, overrides: tuple[str, ...], alone: bool, says: str
) -> None:
    made = planned(catalogue, *overrides)
    assert made.adapters_alone is alone
    assert any(says in note for note in made.notes) if says else not any("adapters" in note for note in made.notes)


def test_parts_are_frozen_by_the_names_that_the_family_gives_them() -> None:
    model = ModelTable(path=Path("model"), lora=Lora(), freeze=("vision", "lm_head"))
    family = SimpleNamespace(parts=lambda table: {"vision": ("visual.*", "merger")})
    run = SimpleNamespace(
        model=model, critic=CriticTable(), reference=ReferenceTable(), family=SimpleNamespace(chosen="the family")
    )
    context: Any = SimpleNamespace(config=run, build=lambda chosen, contract: {"the family": family}[chosen])
    assert _model(context, "actor")["freeze"] == ["visual.*", "merger", "lm_head"]


def test_a_critic_trains_as_much_of_its_body_as_the_policy() -> None:
    lora = Lora(rank=4)
    model = ModelTable(path=Path("model"), lora=lora)
    run = SimpleNamespace(model=model, critic=CriticTable(path=Path("judge")), reference=ReferenceTable())
    found = _model(cast(Any, SimpleNamespace(config=run)), "critic")
    assert found["path"] == "judge" and found["lora"]["rank"] == 4
