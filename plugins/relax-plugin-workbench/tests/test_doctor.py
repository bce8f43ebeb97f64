# SPDX-License-Identifier: Apache-2.0
"""`relax doctor` reports problems of the installation, the machine and a configuration, with their fixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from relax_plugin_workbench import doctor
from relax_plugin_workbench.doctor import MACHINE, SETUP, findings

from relax_core.registry.catalogue import Catalogue
from relax_core.registry.handshake import PluginState

RECIPE = ["quickstart"]


@pytest.fixture(scope="module", autouse=True)
def _devices_once() -> Iterator[None]:
    """Ask torch for the devices once: its import takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "devices", cache(doctor.devices))
        yield


def named(name: str, *overrides: str) -> list[str]:
    return [found.line for found in findings(RECIPE, overrides) if found.name == name]


def test_this_environment_is_well() -> None:
    catalogue = Catalogue.load()
    found = [doctor.python(), doctor.packages(), doctor.plugins(catalogue), doctor.loopback()]
    assert [one.line for one in found if one.exit_code] == []


def test_requirements_that_are_missing_or_of_another_version_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["no-such-package>=1", "packaging<1", "pluggy>=1", 'no-such-other; extra == "ray"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: wanted)
    packages = doctor.packages()
    missing, other = packages.detail.split("; ")
    assert missing == "no-such-package is not installed"
    assert other.startswith("packaging is ") and other.endswith("not <1")
    assert packages.exit_code == SETUP


def test_a_broken_plugin_is_a_problem_with_its_reason() -> None:
    class Installed:
        records = [replace(Catalogue.load().records[0], state=PluginState.BROKEN, reason="RuntimeError: no licence")]

    found = doctor.plugins(Installed())  # type: ignore[arg-type]
    assert "no licence" in found.detail and found.fix and found.exit_code == SETUP


def test_ray_is_a_problem_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ['ray[serve]>=999; extra == "ray"'])
    needed, spare = doctor.ray(needed=True), doctor.ray(needed=False)
    assert needed.exit_code == SETUP and "--runner local" in needed.fix
    assert spare.exit_code == 0 and "only the runner local" in spare.detail


def test_too_little_room_is_the_machines_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Usage:
        total, free = 64 << 20, 1 << 20

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage)
    for found in (doctor.disk(tmp_path / "not" / "there"), doctor.shared_memory(tmp_path)):
        assert found.exit_code == MACHINE and found.fix
    assert doctor.shared_memory(tmp_path / "none").exit_code == 0


def test_every_problem_of_a_configuration_has_its_line() -> None:
    lines = named("configuration", "rollout.group_size=1", "max_staleness=0", "batch.updates_per_step=99")
    assert len(lines) == 2
    assert all(line.startswith("problem") for line in lines)
    assert "rollout.group_size" in lines[0] and "batch.updates_per_step" in lines[1]
