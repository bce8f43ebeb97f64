# SPDX-License-Identifier: Apache-2.0
"""The classes that the walk follows are derived from the contracts."""

from __future__ import annotations

import pytest

from tests.style.forms import contract_forms
from tests.style.walk import CORE, ROOT, Source, all_forms


def test_a_sample_is_followed_from_its_task_to_the_loss_and_into_plugins() -> None:
    forms = all_forms()
    core, every = forms["sample"]
    assert {"Task", "InflightGroup", "GenerateRequest", "Trajectory", "RowBatch", "PackedBatch", "Loss"} <= core
    assert not {"ControlOperation", "Origin"} & core, "an alias has the name of a class that carries a sample"
    assert {"Batch"} <= every - core
    assert {"Manifest", "Receipt"} <= forms["publish"][0]
    assert not {"Version", "RowId", "Plan", "Context", "EnginePool"} & every


def test_a_contract_that_does_not_exist_is_named() -> None:
    api = Source((ROOT / CORE / "api").glob("*.py"))
    with pytest.raises(LookupError, match=r"no Reward\.judge; correct CONTRACTS"):
        contract_forms(["Reward.judge", "Reward.score"], api)
