# SPDX-License-Identifier: Apache-2.0
"""What `relax doctor` looks at: the installation, the machine, and with a configuration whether its run could start.

Nothing is started, written or downloaded; ray and torch are asked for in processes of their own. What a run refuses by
itself is asked of the run's own code.

The installation as the doctor sees it: Python, packages, plugins, ray. Light: other interpreters import it too.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from relax_core.api.errors import ConfigError, RelaxError
from relax_core.config.run_config import RunConfig
from relax_core.control import machine
from relax_core.control.machine import MACHINE, SETUP, Finding, probe
from relax_core.control.planner import plan
from relax_core.control.prepare import configured
from relax_core.observe.run_directory import runs_root
from relax_core.registry.catalogue import Catalogue
from relax_core.registry.handshake import PluginState
from relax_core.sampling.evaluation import open_tasks


def python() -> Finding:
    """The interpreter that runs this."""
    wanted = SpecifierSet(metadata.metadata("relax-core")["Requires-Python"] or "")
    have = f"{platform.python_version()} ({sys.executable})"
    fix = "" if wanted.contains(platform.python_version(), prereleases=True) else f"install Python {wanted}"
    return Finding("python", have, fix, SETUP if fix else 0)


def packages() -> Finding:
    """What relax-core requires of its environment."""
    wrong = unmet("relax-core")
    if wrong:
        return Finding("packages", "; ".join(wrong), "pip install --upgrade relax-core", SETUP)
    return Finding("packages", f"relax-core {metadata.version('relax-core')} with all that it requires")


def unmet(distribution: str) -> list[str]:
    """Requirements of a distribution that are not there, in words."""
    return [said for line in metadata.requires(distribution) or [] if (said := _unmet(Requirement(line)))]


def _unmet(wanted: Requirement) -> str:
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return ""
    try:
        have = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed"
    return (
        "" if wanted.specifier.contains(have, prereleases=True) else f"{wanted.name} is {have}, not {wanted.specifier}"
    )


def plugins(catalogue: Catalogue) -> Finding:
    """Broken ones; those that were skipped are named."""
    broken = [record for record in catalogue.records if record.state is PluginState.BROKEN]
    skipped = [
        f"{record.title} ({record.reason})" for record in catalogue.records if record.state is PluginState.SKIPPED
    ]
    if broken:
        detail = "; ".join(f"{record.title} is broken: {record.reason}" for record in broken)
        return Finding("plugins", detail, "`relax plugins show NAME` has the traceback; repair or uninstall it", SETUP)
    said = f"; skipped: {', '.join(skipped)}" if skipped else ""
    return Finding("plugins", f"{len(catalogue.records) - len(skipped)} load{said}")


def ray(needed: bool) -> Finding:
    """Whether the runner ray could be chosen; a problem only where it was."""
    wanted = [Requirement(line) for line in metadata.requires("relax-core") or [] if line.startswith("ray")]
    wrong = next((said for said in (_unmet_extra(requirement) for requirement in wanted) if said), "")
    if wrong:
        fix = 'pip install "relax-core[ray]", or --runner local' if needed else ""
        return Finding(
            "ray", f"{wrong}{'' if needed else ': only the runner local can be used'}", fix, SETUP if fix else 0
        )
    said, failure = probe(sys.executable, "import ray; print(ray.__version__)")
    if failure:
        fix = "reinstall it, or --runner local" if needed else ""
        return Finding("ray", f"it can't be imported: {failure}", fix, SETUP if fix else 0)
    return Finding("ray", said)


def _unmet_extra(wanted: Requirement) -> str:
    return _unmet(Requirement(f"{wanted.name}{wanted.specifier}"))


def findings(sources: Sequence[str], overrides: Sequence[str]) -> Iterator[Finding]:
    """The installation, the machine, and the configuration where one is given."""
    catalogue = Catalogue.load()
    yield from (python(), packages(), plugins(catalogue))
    yield from (machine.processors(), machine.memory(), machine.disk(runs_root()))
    yield from (machine.shared_memory(), machine.loopback(), machine.devices())
    runner = ""
    if sources or overrides:
        try:
            config, catalogue, on_disk = configured(sources, overrides)
        except RelaxError as error:
            yield from _refused("configuration", error)
        else:
            runner = config.run.runner
            yield from _configuration(config, catalogue, on_disk)
    yield ray(needed=runner == "ray")


def _configuration(config: RunConfig, catalogue: Catalogue, on_disk: bool) -> Iterator[Finding]:
    said = f"{config.algorithm.name}, {config.steps} steps, placement {config.placement.mode}"
    yield Finding("configuration", said)
    yield from (Finding("plan", note) for note in plan(config, catalogue).notes)
    if on_disk:
        yield from run_files(config, catalogue)
    yield from interpreters(config, catalogue)


@dataclass(frozen=True, slots=True)
class _DoctorContext:
    """As much of a role's context as opening tasks takes."""

    config: RunConfig
    build: Callable[..., Any]


def run_files(config: RunConfig, catalogue: Catalogue) -> Iterator[Finding]:
    """Model folder and task files, opened as a run opens them."""
    try:
        family: Any = catalogue.build(config.family.chosen)
        family.open(config.model.model_dump(mode="json"))
        yield Finding("model", f"{config.model.path}: configuration, tokenizer and chat template load")
        tasks, train, sets = open_tasks(_DoctorContext(config, catalogue.build), family)  # type: ignore[arg-type]
        tasks.prompt(0)
    except RelaxError as error:
        yield from _refused("model" if isinstance(error, ConfigError) and "model" in error.field else "data", error)
        return
    skipped = f", {tasks.num_skipped} skipped as too long" if tasks.num_skipped else ""
    evaluated = "".join(f"; {one.name}: {len(one.indices)} to evaluate" for one in sets)
    yield Finding("data", f"{config.data.train}: {len(train)} tasks{skipped}{evaluated}")


PACKAGES = """
import json, sys
from relax_core.diagnostics.doctor import unmet
from relax_core.registry.catalogue import Catalogue
distribution, kind, name, *files = json.loads(sys.argv[1])
Catalogue.load(files).target(kind, name)
print(json.dumps(unmet(distribution) if distribution else []))
"""


def interpreters(config: RunConfig, catalogue: Catalogue) -> Iterator[Finding]:
    """Whether engines and trainer find their plugin and its packages under the Python that they are given."""
    pools = [(f"engines.{at}", config.backend_of(pool)) for at, pool in enumerate(config.engines) if pool.engine]
    for table, choice in (("engine", config.engine), ("trainer", config.trainer), *pools):
        found = catalogue.find(choice.chosen.kind, choice.chosen.name)
        executable = str(choice.python or sys.executable)
        distribution = found.distribution if found.version else ""  # a single file has no packages of its own
        asked = json.dumps([distribution, choice.chosen.kind, choice.chosen.name, *map(str, config.plugins)])
        said, failure = probe(executable, PACKAGES, asked)
        wrong = failure or "; ".join(json.loads(said))
        fix = f"{executable} -m pip install --upgrade {distribution}" if wrong else ""
        detail = f"{choice.name} under {executable}: {wrong or 'its packages are there'}"
        yield Finding(table, detail, fix, SETUP if wrong else 0)


def _refused(name: str, error: RelaxError) -> Iterator[Finding]:
    """An error of ours as findings, one for each problem in it."""
    for one in getattr(error, "errors", (error,)):
        detail, fix = str(one), "repair it"
        if isinstance(one, ConfigError):
            detail, fix = f"{one.field}: got {one.got}", one.fix
        yield Finding(name, detail, fix, MACHINE if error.exit_code == MACHINE else SETUP)
