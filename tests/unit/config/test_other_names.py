# SPDX-License-Identifier: Apache-2.0
"""Keys of other systems: every hint names a key of Relax, and the page for newcomers explains the same keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relax_core.api.component import BY_TABLE
from relax_core.api.errors import ConfigError
from relax_core.config.compose import compose
from relax_core.config.other_names import OTHER_NAMES, PAGE, hint
from relax_core.config.run_config import Core, table_keys
from relax_core.config.tables import Lora
from tests.wiring.options import CATALOGUE, MINIMAL, options

ROOT = Path(__file__).parents[3]
WITHOUT_HINT = ["kl_ctrl.kl_coef", "custom_reward_function.path", "kl-coef"]
"""Relax has a `kl_coef` of another meaning, and the table of the second has a hint as a whole."""


def keys_of_relax() -> set[str]:
    known = set(Core.model_fields) | set(BY_TABLE)
    for table, names in table_keys().items():
        known |= {f"{table}.{name}" for name in names}
    known |= {f"model.lora.{name}" for name in Lora.model_fields}
    known |= {f"algorithm.{option}" for _, option in options("algorithm")}
    return known | {f"{table}.name" for table in BY_TABLE}


def test_every_hint_names_a_key() -> None:
    assert set(OTHER_NAMES.values()) - keys_of_relax() == set()


def test_the_page_and_the_hints_agree() -> None:
    """Each name of the page's first column has a hint with a key of the second column, unless the key is the same."""
    pages = (ROOT / PAGE).read_text().partition("## What is not here")[0]
    rows = [line.split(" | ") for line in pages.splitlines() if line.startswith("| `") and line.count(" | ") == 2]
    assert len(rows) > 40
    unexplained = []
    for there, here, *_ in rows:
        ours = re.findall(r"`([\w.]+)`", here)
        for name in re.findall(r"`(?:--)?([\w.-]+)[`=]", there):
            last = name.replace("-", "_").rpartition(".")[2]
            two = next((value for key, value in OTHER_NAMES.items() if "." in key and name.endswith(f".{key}")), "")
            found = two or OTHER_NAMES.get(last, "")
            same = last in {key.rpartition(".")[2] for key in ours}
            if not same and not any(found in (key, f"{key}.name") or key == f"{found}.name" for key in ours):
                unexplained.append(name)
    assert unexplained == WITHOUT_HINT


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("learning_rate", "optimizer.lr"),
        ("algorithm.beta", "algorithm.kl_coef"),
        ("rollout.n", "rollout.group_size"),
        ("n-samples-per-prompt", "rollout.group_size"),
        ("actor_rollout_ref.rollout.n", "a table of verl"),
    ],
)
def test_an_unknown_key_of_another_system_is_refused_with_its_name_here(key: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([MINIMAL], [f"{key}=1"], CATALOGUE, on_disk=False)
    assert ours in str(caught.value) and PAGE in str(caught.value)


def test_other_keys_get_no_hint() -> None:
    assert [hint(key) for key in ("optimizer.lr", "lr", "n", "filters.0.n", "rollout_groups")] == [""] * 5
