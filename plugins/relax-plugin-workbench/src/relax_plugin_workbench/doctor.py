# SPDX-License-Identifier: Apache-2.0
"""The verb `relax doctor`, which checks the installation, the machine, and a configuration if one is given.

Nothing is started, written or downloaded; torch and ray are imported in child processes. A configuration is checked
with the same code that a run uses.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from packaging.specifiers import SpecifierSet

from relax_core.api.errors import ConfigError, RelaxError
from relax_core.api.plan import Plan
from relax_core.cli.terminal import AsJson, print_json, say, split
from relax_core.control.data_check import open_data
from relax_core.control.start_check import check_starts, probe, unmet
from relax_core.launch import Catalogue, PluginState, RunConfig, plan_run
from relax_core.runs import runs_root

SETUP, MACHINE = 2, 4
"""Exit codes for a problem of the installation or configuration, and for a problem of the machine."""
LEAST_MEMORY, LEAST_DISK, LEAST_SHARED = 1 << 30, 1 << 30, 256 << 20
"""Free bytes that even the smallest runs need; torch alone takes half a gigabyte per process."""


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


def doctor(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[FILES...] [KEY=VALUE]...", help="A configuration to check as well.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the machine, the installation and a configuration."""
    found: list[Finding] = []
    for finding in findings(*split(arguments or [])):
        found.append(finding)
        if not as_json:
            say(finding.line)
    code = next((finding.exit_code for finding in found if finding.exit_code), 0)
    if as_json:
        rows = [{"ok": not finding.exit_code, **asdict(finding)} for finding in found]
        print_json({"schema": "relax.doctor/1", "ok": not code, "exit_code": code, "findings": rows})
    raise typer.Exit(code)


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
    if problems := unmet("relax-core"):
        return Finding("packages", "; ".join(problems), "pip install --upgrade relax-core", SETUP)
    return Finding("packages", f"relax-core {metadata.version('relax-core')} with all of its requirements")


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
    if problem := next((text for text in unmet("relax-core", "ray") if text.startswith("ray ")), ""):
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
    if not os.access(home, os.W_OK):
        return Finding("disk", f"{home} is not writable", "set RELAX_RUNS to a writable folder", MACHINE)
    free = shutil.disk_usage(home).free
    fix = "free some, or set RELAX_RUNS to a folder on another disk" if free < LEAST_DISK else ""
    return Finding("disk", f"{_gib(free)} free for runs in {root.absolute()}", fix, MACHINE if fix else 0)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Check the shared memory, which carries weights between processes and holds Ray's objects."""
    if not path.is_dir():
        return Finding("shared memory", "no /dev/shm: weights go through the run directory")
    usage = shutil.disk_usage(path)
    fix = "delete unused files there, or give the container more (docker run --shm-size=4g)"
    fix = fix if usage.free < LEAST_SHARED else ""
    detail = f"{_gib(usage.free)} of {_gib(usage.total)} free in {path}"
    return Finding("shared memory", detail, fix, MACHINE if fix else 0)


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
    printed, failure = probe(sys.executable, f"import torch; print(torch.__version__, {names}, sep='|')")
    if failure:
        detail = f"torch can't be imported here ({failure}): no problem if engine and trainer set their own `python`"
        return Finding("devices", detail)
    version, *gpus = printed.split("|")
    return Finding("devices", f"torch {version}, {', '.join(gpus) or 'no GPU: runs use the CPU'}")


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


def _refused(name: str, error: RelaxError) -> Iterator[Finding]:
    """Convert an error into findings, one for each problem that it lists."""
    for problem in getattr(error, "errors", (error,)):
        detail, fix = str(problem), "fix this problem"
        if isinstance(problem, ConfigError):
            detail, fix = f"{problem.field}: got {problem.got}", problem.fix
        yield Finding(name, detail, fix, MACHINE if error.exit_code == MACHINE else SETUP)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
