# SPDX-License-Identifier: Apache-2.0
"""The checks that plugins make of a run (`relax_checks`): before the run starts, and after its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, cast

import psutil

from relax_core.api.checks import CheckFinding, FirstStepFacts, PreflightFacts
from relax_core.api.component import Check
from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.plan import Plan
from relax_core.config.problems import refuse
from relax_core.config.run_config import RunConfig
from relax_core.registry.catalogue import Catalogue, Found, installable
from relax_core.registry.error_text import authored


def preflight(config: RunConfig, catalogue: Catalogue, plan: Plan, *, starts: bool = False) -> tuple[str, ...]:
    """Make the preflight checks of all plugins; return a notice for each warning, and if nothing checks the first step.

    `starts`: this process starts the run after the checks.
    Raises ConfigError for a failed check, and PluginError for a check that raises.
    """
    notices = unchecked(config, catalogue)
    if not (checks := checks_of(catalogue, "preflight")):
        return notices
    facts = PreflightFacts(config.dump(), plan, free_memory(), starts)
    found = [finding for check in checks for finding in made(check, catalogue, facts)]
    refuse((ConfigError(of.field or of.name, _seen(of), of.advice) for of in found if of.state == "failed"), {})
    return (*notices, *(f"{of.name}: {_seen(of)}; {of.advice}" for of in found if of.state == "warning"))


def unchecked(config: RunConfig, catalogue: Catalogue) -> tuple[str, ...]:
    """Return a notice if no plugin checks the first step of a run. Raises ConfigError if a failed check should stop it."""
    guard = config.guards.first_step
    if guard == "off" or checks_of(catalogue, "first-step"):
        return ()
    home = installable().get("check", {}).get("first-step", "a plugin with such checks")
    if guard == "stop":
        raise ConfigError("guards.first_step", '"stop", but no plugin checks the first step', f"pip install {home}")
    return (f"no plugin checks the first step of the run: pip install {home}",)


def first_step(facts: FirstStepFacts, catalogue: Catalogue) -> tuple[CheckFinding, ...]:
    """Make the checks of the first step. A check that raises becomes a warning that names its plugin."""
    found: list[CheckFinding] = []
    for check in checks_of(catalogue, "first-step"):
        try:
            found += made(check, catalogue, facts)
        except (ConfigError, PluginError) as error:
            advice = "report this error to the author of the plugin; the other checks are complete"
            found.append(CheckFinding(f"{check.component.name} is checked", "warning", str(error), "", advice))
    return tuple(found)


def checks_of(catalogue: Catalogue, stage: str) -> list[Found]:
    """Return the checks of a stage that the loaded plugins offer."""
    return [found for found in catalogue.all("check") if cast(Check, found.component).stage == stage]


def made(check: Found, catalogue: Catalogue, facts: PreflightFacts | FirstStepFacts) -> list[CheckFinding]:
    """Return the findings of one check.

    Raises PluginError for a check that raises, yields anything else, or takes too long; its thread is then abandoned.
    """
    function = cast(
        Callable[[Any], Iterable[CheckFinding]], catalogue.target("check", f"{check.plugin}:{check.component.name}")
    )
    timeout_s = cast(Check, check.component).timeout_s
    answers: SimpleQueue[list[CheckFinding] | Exception] = SimpleQueue()

    def answer() -> None:
        try:
            answers.put(list(function(facts)))
        except Exception as error:
            answers.put(error)

    Thread(target=answer, name=f"check-{check.component.name}", daemon=True).start()
    try:
        findings = answers.get(timeout=timeout_s)
    except Empty:
        fault = f"it did not return within {timeout_s:g} s; make it faster, or raise `timeout_s` of its Check"
        raise PluginError(f"check {check.title}", fault) from None
    with authored(f"check {check.title}"):
        if isinstance(findings, Exception):
            raise findings
    for one in findings:
        if not (isinstance(one, CheckFinding) and all(isinstance(value, str) for value in one.plain().values())):
            raise PluginError(f"check {check.title}", f"it yields {one!r}; it must yield CheckFindings of text")
    return findings


def _seen(finding: CheckFinding) -> str:
    return "; ".join(filter(None, (finding.found, finding.evidence)))


def free_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that new processes of this machine or container may use; the kernel's caches count as free."""
    available: int = psutil.virtual_memory().available
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # not in a container, or without a limit
        return available
    cached = sum(int(stat.get(name, 0)) for name in ("active_file", "inactive_file", "slab_reclaimable"))
    return max(0, min(available, limit - used + cached))
