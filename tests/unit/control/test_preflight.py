# SPDX-License-Identifier: Apache-2.0
"""Checks of plugins: a failure before the run refuses the run, and a faulty check is charged to its plugin."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_core.api.checks import FirstStepFacts
from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.plan import Plan
from relax_core.config.compose import parse_config
from relax_core.control.preflight import checks_of, first_step, free_memory, preflight
from relax_core.registry import Catalogue

PLAN = Plan("colocate", (), (), {}, ())
DATA: dict[str, Any] = {
    "model": {"path": "/m"}, "data": {"train": "/t.jsonl"}, "placement": {"check_memory": False}
}  # fmt: skip
CHECKS = """
from relax_core.api import Check, CheckFinding, hook

@hook
def relax_checks():
    return [Check("look", __name__ + ":look", "Looks", stage={stage!r}, timeout_s={timeout_s})]

def look(facts):
    {body}
"""
FAILED = (
    'yield CheckFinding("lr is small", "failed", str(facts.config["optimizer"]["lr"]), "x", "lower it", "optimizer.lr")'
)


def looking(tmp_path: Path, body: str, stage: str = "preflight", timeout_s: float = 30.0) -> Catalogue:
    (tmp_path / "looks.py").write_text(CHECKS.format(stage=stage, timeout_s=timeout_s, body=body))
    return Catalogue.load([str(tmp_path / "looks.py")])


def checked(catalogue: Catalogue) -> tuple[str, ...]:
    return preflight(parse_config({**DATA, "optimizer": {"lr": 0.5}}, catalogue), catalogue, PLAN)


def test_a_failed_check_refuses_the_run_and_a_warning_is_a_notice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lr: got 0\.5; x; lower it"):
        checked(looking(tmp_path, FAILED))
    memory = 'yield CheckFinding("memory", "warning", str(facts.free_memory_bytes > 0), "", facts.plan.mode)'
    assert checked(looking(tmp_path, memory)) == ("memory: True; colocate",)
    assert checked(looking(tmp_path, 'yield CheckFinding("fine", "ok", "all")')) == ()


@pytest.mark.parametrize(
    ("body", "said"),
    [("raise ValueError('a bug')", "a bug"), ("return [1]", "yields 1; it must yield CheckFindings of text")],
)
def test_a_faulty_check_is_charged_to_its_plugin_and_never_ends_a_run(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(PluginError, match=rf"check 'look' of looks\.py.*{said}"):
        checked(looking(tmp_path, body))
    facts = FirstStepFacts({"steps": 2}, {"reward/mean": 0.5}, {})
    *_, found = first_step(facts, looking(tmp_path, body, "first-step"))
    assert (found.name, found.state) == ("look is checked", "warning") and said in found.found


def test_a_check_that_does_not_return_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"it did not return within 0\.05 s"):
        checked(looking(tmp_path, "import threading; threading.Event().wait()", timeout_s=0.05))


def test_the_checks_of_a_stage_get_the_facts_of_the_stage(tmp_path: Path) -> None:
    catalogue = looking(tmp_path, 'yield CheckFinding("x", "ok", str(facts.metrics))', "first-step")
    assert checked(catalogue) == ()
    *_, found = first_step(FirstStepFacts({}, {"a": 1.0}, {}), catalogue)
    assert found.found == "{'a': 1.0}"


def test_a_run_whose_first_step_nothing_checks_is_told_so_and_refused_if_a_check_should_stop_it() -> None:
    catalogue = Catalogue.load(environ={"RELAX_DISABLE_PLUGINS": "relax-plugin-checks"})
    assert checks_of(catalogue, "first-step") == []
    said = "no plugin checks the first step of the run: pip install relax-plugin-checks"
    for guard, notices in (("warn", (said,)), ("off", ())):
        config = parse_config({**DATA, "guards": {"first_step": guard}}, catalogue)
        assert preflight(config, catalogue, PLAN) == notices
    with pytest.raises(ConfigError, match=r"guards\.first_step: .*pip install relax-plugin-checks"):
        preflight(parse_config({**DATA, "guards": {"first_step": "stop"}}, catalogue), catalogue, PLAN)


def limited(folder: Path, limit: str, used: int = 0, cached: int = 0) -> Path:
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(str(used))
    (folder / "memory.stat").write_text(f"anon 5\nactive_file {cached}\ninactive_file 10\n")
    return folder


def test_a_container_gives_what_is_left_below_its_limit_and_what_only_caches_files(tmp_path: Path) -> None:
    assert free_memory(limited(tmp_path, "1000", used=700, cached=40)) == 1000 - 700 + 50


def test_without_a_limit_the_machine_gives_what_is_available(tmp_path: Path) -> None:
    there = psutil.virtual_memory().total
    assert 0 < free_memory(limited(tmp_path, "max")) <= there
    assert 0 < free_memory(tmp_path / "no-container") <= there
