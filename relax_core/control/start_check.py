# SPDX-License-Identifier: Apache-2.0
"""A check that engines, the trainer and the placement can start: imports in their own interpreters, and a look for GPUs.

Child processes make the imports, so this process imports neither torch nor an engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from itertools import chain

from packaging.requirements import Requirement

from relax_core.api.plan import Plan
from relax_core.config.run_config import BackendChoice, RunConfig
from relax_core.control.placement import has_gpus
from relax_core.registry.catalogue import Catalogue

PROBE_S = 600.0
"""Most seconds that a child process may take to import packages, on a busy machine too."""
START = """
import json, sys
from relax_core.api.component import Chosen
from relax_core.api.errors import ConfigError, RelaxError
from relax_core.control.start_check import unmet
from relax_core.registry.catalogue import Catalogue
here, components, *files = json.loads(sys.argv[1])
catalogue, found = Catalogue.load(files), []
for distribution, *chosen in components:
    wrong, fix, chosen = "; ".join(unmet(distribution)) if distribution else "", "", Chosen(*chosen)
    try:
        with catalogue.authored(chosen):
            wrong or catalogue.build(chosen).check_start(here)
    except ConfigError as error:
        wrong, fix = f"{error.field}: got {error.got}", error.fix
    except RelaxError as error:
        wrong = str(error)
    found.append([wrong, fix])
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class StartCheck:
    """The result of one check that an engine, a trainer or the placement can start."""

    table: str
    what: str
    wrong: str = ""
    """The problem; empty if the component can start."""
    fix: str = ""


def check_starts(config: RunConfig, catalogue: Catalogue, plan: Plan) -> Iterator[StartCheck]:
    """Import each engine and the trainer in its own interpreter, and look for the GPUs that the run needs.

    On Ray the components start on other machines, so GPUs are not checked.
    """
    here = config.run.runner != "ray"
    gpus = sorted({name for group in plan.groups.values() for name in group.devices if name.startswith("gpu:")})
    if here and gpus and not has_gpus():
        fix = "set the keys gpus_per_engine and gpus_per_rank of [placement] to 0, or leave them out"
        yield StartCheck("placement", ", ".join(gpus), "this machine has no GPU", fix)
    pools = [
        (f"engines.{index}.engine", config.backend_of(pool)) for index, pool in enumerate(config.engines) if pool.engine
    ]
    choices = [("engine", config.engine)] * ("rollout" in plan.roles) + [("trainer", config.trainer), *pools]
    groups: dict[str, list[tuple[str, BackendChoice]]] = {}
    for table, choice in choices:
        groups.setdefault(str(choice.python or sys.executable), []).append((table, choice))

    def check(executable: str) -> list[StartCheck]:
        components, distributions = [], []
        for _, choice in groups[executable]:
            found = catalogue.find(choice.chosen.kind, choice.name)
            distributions.append(found.distribution if found.version else "")  # a single-file plugin has no packages
            components.append([distributions[-1], choice.chosen.kind, choice.name, choice.chosen.options])
        printed, failure = probe(executable, START, json.dumps([here, components, *map(str, config.plugins)]))
        results = [(failure, "")] * len(components) if failure else json.loads(printed)
        pip = f"{executable} -m pip install --upgrade"
        return [
            StartCheck(table, f"{choice.name} under {executable}", wrong, wrong and (fix or f"{pip} {distribution}"))
            for (table, choice), distribution, (wrong, fix) in zip(
                groups[executable], distributions, results, strict=True
            )
        ]

    with ThreadPoolExecutor() as threads:
        yield from chain.from_iterable(threads.map(check, groups))


def unmet(distribution: str, extra: str = "") -> list[str]:
    """Return the unmet requirements of a distribution with an extra, as text."""
    problems = []
    for wanted in map(Requirement, metadata.requires(distribution) or ()):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        try:
            have = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            problems.append(f"{wanted.name} is not installed")
            continue
        if not wanted.specifier.contains(have, prereleases=True):
            problems.append(f"{wanted.name} is {have}, not {wanted.specifier}")
    return problems


def probe(executable: str, script: str, *arguments: str) -> tuple[str, str]:
    """Run a Python script in a child process; return the last line that it printed, and the error or ""."""
    command = [executable, "-c", script, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {PROBE_S:.0f} s"
    except OSError as error:
        return "", f"{type(error).__name__}: {error}"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return done.stdout.strip().splitlines()[-1], ""
