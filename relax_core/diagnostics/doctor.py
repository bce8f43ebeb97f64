# SPDX-License-Identifier: Apache-2.0
"""Checks of `relax doctor`: the installation, the machine, and, if given, a configuration.

Nothing is started, written or downloaded; torch and ray are imported in child processes. A configuration is checked
with the same code that a run uses.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from relax_core.api.errors import ConfigError, RelaxError
from relax_core.api.plan import Plan
from relax_core.config.run_config import BackendChoice, RunConfig
from relax_core.control.data_check import open_data
from relax_core.control.placement import has_gpus
from relax_core.control.prepare import plan_run
from relax_core.observe.run_directory import runs_root
from relax_core.registry.catalogue import Catalogue
from relax_core.registry.handshake import PluginState

PROBE_S = 600.0
"""Most seconds that a child process may take to import packages, on a busy machine too."""
SETUP, MACHINE = 2, 4
"""Exit codes for a problem of the installation or configuration, and for a problem of the machine."""
LEAST_MEMORY, LEAST_DISK, LEAST_SHARED = 1 << 30, 1 << 30, 256 << 20
"""Free bytes that even the smallest runs need; torch alone takes half a gigabyte per process."""
START = """
import json, sys
from relax_core.api.component import Chosen
from relax_core.api.errors import ConfigError, RelaxError
from relax_core.diagnostics.doctor import unmet
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
class Finding:
    """The result of one check, with the fix if there is a problem."""

    name: str
    detail: str
    fix: str = ""
    exit_code: int = 0
    """Exit code for this problem, `SETUP` or `MACHINE`; 0: no problem."""

    @property
    def line(self) -> str:
        mark = "problem" if self.exit_code else "ok"
        return f"{mark:<8} {self.name:<14} {self.detail}{f'; {self.fix}' if self.fix else ''}"


def findings(sources: Sequence[str], overrides: Sequence[str]) -> Iterator[Finding]:
    """Check the installation, the machine, and the configuration if one is given."""
    yield from (python(), packages(), plugins(Catalogue.load()))
    yield from (processors(), memory(), disk(runs_root()), shared_memory(), loopback(), devices())
    runner = ""
    if sources or overrides:
        try:
            planned = plan_run(sources, overrides)
        except RelaxError as error:
            yield from _refused("configuration", error)
        else:
            runner = planned.composed.config.run.runner
            config, catalogue, plan = planned.composed.config, planned.catalogue, planned.stages[0].plan
            detail = f"{config.algorithm.name}, {config.steps} steps, placement {config.placement.mode}"
            yield Finding("configuration", detail)
            yield from (Finding("plan", note) for note in (*planned.composed.notices, *plan.notes))
            if planned.recipe is None:
                yield from _run_files(config, catalogue, plan)
                try:
                    yield from (Finding("checks", notice) for notice in planned.preflight())
                except RelaxError as error:
                    yield from _refused("checks", error)
            for check in check_starts(config, catalogue, plan):
                detail = f"{check.what}: {check.wrong or 'its packages can be imported'}"
                yield Finding(check.table, detail, check.fix, SETUP if check.wrong else 0)
    yield ray(needed=runner == "ray")


# -- the installation -------------------------------------------------------------------------------------------------


def python() -> Finding:
    """Check the version of the running interpreter."""
    wanted = SpecifierSet(metadata.metadata("relax-core")["Requires-Python"] or "")
    have = f"{platform.python_version()} ({sys.executable})"
    fix = "" if wanted.contains(platform.python_version(), prereleases=True) else f"install Python {wanted}"
    return Finding("python", have, fix, SETUP if fix else 0)


def packages() -> Finding:
    """Check the packages that relax-core requires."""
    wrong = unmet("relax-core")
    if wrong:
        return Finding("packages", "; ".join(wrong), "pip install --upgrade relax-core", SETUP)
    return Finding("packages", f"relax-core {metadata.version('relax-core')} with all of its requirements")


def unmet(distribution: str) -> list[str]:
    """List the unmet requirements of a distribution, as text."""
    wanted = [Requirement(line) for line in metadata.requires(distribution) or []]
    applies = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [problem for one in applies if (problem := _problem_of(one))]


def _problem_of(wanted: Requirement) -> str:
    try:
        have = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed"
    return (
        "" if wanted.specifier.contains(have, prereleases=True) else f"{wanted.name} is {have}, not {wanted.specifier}"
    )


def plugins(catalogue: Catalogue) -> Finding:
    """Check that no plugin is broken; list the plugins that were skipped."""
    broken = [record for record in catalogue.records if record.state is PluginState.BROKEN]
    skipped = [record for record in catalogue.records if record.state is PluginState.SKIPPED]
    if broken:
        detail = "; ".join(f"{record.title} is broken: {record.reason}" for record in broken)
        return Finding("plugins", detail, "`relax plugins show NAME` has the traceback; repair or uninstall it", SETUP)
    names = ", ".join(f"{record.title} ({record.reason})" for record in skipped)
    return Finding("plugins", f"{len(catalogue.records) - len(skipped)} load{f'; skipped: {names}' if skipped else ''}")


def ray(needed: bool) -> Finding:
    """Check that the runner `ray` can be used; a failure counts as a problem only if ray is `needed`."""
    wanted = [Requirement(line) for line in metadata.requires("relax-core") or [] if line.startswith("ray")]
    if problem := next((said for said in map(_problem_of, wanted) if said), ""):
        fix = 'pip install "relax-core[ray]", or --runner local' if needed else ""
        detail = problem if needed else f"{problem}: only the runner local can be used"
        return Finding("ray", detail, fix, SETUP if fix else 0)
    version, failure = probe(sys.executable, "import ray; print(ray.__version__)")
    if failure:
        fix = "reinstall it, or --runner local" if needed else ""
        return Finding("ray", f"ray can't be imported: {failure}", fix, SETUP if fix else 0)
    return Finding("ray", version)


# -- the machine ------------------------------------------------------------------------------------------------------


def processors() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("cores", f"{usable} usable, load {os.getloadavg()[0]:.1f}")


def memory() -> Finding:
    free = psutil.virtual_memory()
    detail = f"{_gib(free.available)} of {_gib(free.total)} available"
    fix = "free some: each process of a run takes about half a GiB" if free.available < LEAST_MEMORY else ""
    return Finding("memory", detail, fix, MACHINE if fix else 0)


def disk(root: Path) -> Finding:
    """Check the disk that runs are written to: free space and write permission."""
    home = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(home).free
    detail = f"{_gib(free)} free for runs in {root.absolute()}"
    if not os.access(home, os.W_OK):
        return Finding("disk", f"{home} is not writable", "set RELAX_RUNS to a writable folder", MACHINE)
    if free < LEAST_DISK:
        return Finding("disk", detail, "free some, or set RELAX_RUNS to a folder on another disk", MACHINE)
    return Finding("disk", detail)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Check the shared memory, which carries weights between processes and holds Ray's objects."""
    if not path.is_dir():
        return Finding("shared memory", "no /dev/shm: weights go through the run directory")
    usage = shutil.disk_usage(path)
    detail = f"{_gib(usage.free)} of {_gib(usage.total)} free in {path}"
    if usage.free < LEAST_SHARED:
        fix = "delete unused files there, or give the container more (docker run --shm-size=4g)"
        return Finding("shared memory", detail, fix, MACHINE)
    return Finding("shared memory", detail)


def loopback() -> Finding:
    """Check that workers can listen on ports of 127.0.0.1."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
            return Finding("loopback", f"port {probe.getsockname()[1]} of 127.0.0.1 is free")
    except OSError as error:
        fix = "free ports: see `ss -tan` and net.ipv4.ip_local_port_range"
        return Finding("loopback", f"a port of 127.0.0.1 can't be opened: {error.strerror}", fix, MACHINE)


def devices() -> Finding:
    """List the GPUs that torch sees."""
    names = "*(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))"
    said, failure = probe(sys.executable, f"import torch; print(torch.__version__, {names}, sep='|')")
    if failure:
        detail = f"torch can't be imported here ({failure}): no problem if engine and trainer set their own `python`"
        return Finding("devices", detail)
    version, *gpus = said.split("|")
    return Finding("devices", f"torch {version}, {', '.join(gpus) or 'no GPU: runs use the CPU'}")


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


# -- a configuration --------------------------------------------------------------------------------------------------


def _run_files(config: RunConfig, catalogue: Catalogue, plan: Plan) -> Iterator[Finding]:
    """Open the model folder and the task files as a run does."""
    try:
        family: Any = catalogue.build(config.family.chosen)
        family.open(config.model.model_dump(mode="json"))
        yield Finding("model", f"{config.model.path}: configuration, tokenizer and chat template load")
        data = open_data(config, catalogue, plan)
        data.rows.prompt(0)
    except RelaxError as error:
        yield from _refused("model" if isinstance(error, ConfigError) and "model" in error.field else "data", error)
        return
    yield from (Finding("data", text) for text in (f"{config.data.train}: {data}", *data.compared))


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
    pools = [(f"engines.{at}.engine", config.backend_of(pool)) for at, pool in enumerate(config.engines) if pool.engine]
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
        said, failure = probe(executable, START, json.dumps([here, components, *map(str, config.plugins)]))
        results = [(failure, "")] * len(components) if failure else json.loads(said)
        pip = f"{executable} -m pip install --upgrade"
        return [
            StartCheck(table, f"{choice.name} under {executable}", wrong, wrong and (fix or f"{pip} {distribution}"))
            for (table, choice), distribution, (wrong, fix) in zip(
                groups[executable], distributions, results, strict=True
            )
        ]

    with ThreadPoolExecutor() as threads:
        yield from chain.from_iterable(threads.map(check, groups))


def _refused(name: str, error: RelaxError) -> Iterator[Finding]:
    """Convert an error into findings, one for each problem that it lists."""
    for one in getattr(error, "errors", (error,)):
        detail, fix = str(one), "fix this problem"
        if isinstance(one, ConfigError):
            detail, fix = f"{one.field}: got {one.got}", one.fix
        yield Finding(name, detail, fix, MACHINE if error.exit_code == MACHINE else SETUP)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
