# SPDX-License-Identifier: Apache-2.0
"""The machine as the doctor sees it: cores, memory, disk, shared memory, ports, devices.

One line of the doctor's, and how other processes are asked for it. What is looked at is in the modules beside this.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from relax_core.runners.local.workers import seen_gpus

PROBE_S = 120.0
SETUP, MACHINE = 2, 4
"""Exit codes: the installation or the configuration; the machine."""


@dataclass(frozen=True, slots=True)
class Finding:
    """It is well, or what is wrong and what to do."""

    name: str
    detail: str
    fix: str = ""
    exit_code: int = 0
    """0 where it is well."""

    @property
    def line(self) -> str:
        mark = "problem" if self.exit_code else "ok"
        return f"{mark:<8} {self.name:<14} {self.detail}{f'; {self.fix}' if self.fix else ''}"


def probe(executable: str, script: str, *arguments: str) -> tuple[str, str]:
    """(what it printed, why it failed) of a few lines of Python in a process of its own."""
    command = [executable, "-c", script, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{type(error).__name__}: {error}"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return done.stdout.strip().splitlines()[-1], ""


GIB = 1 << 30
LEAST_MEMORY, LEAST_DISK, LEAST_SHARED = 1 * GIB, 1 * GIB, 256 << 20
"""Less than this stops even the smallest runs: torch alone takes half a gigabyte a process."""


def processors() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("cores", f"{usable} usable, load {os.getloadavg()[0]:.1f}")


def memory() -> Finding:
    free = psutil.virtual_memory()
    detail = f"{_gib(free.available)} of {_gib(free.total)} available"
    fix = "free some: each process of a run takes about half a GiB" if free.available < LEAST_MEMORY else ""
    return Finding("memory", detail, fix, MACHINE if fix else 0)


def disk(root: Path) -> Finding:
    """Where runs go: room, and leave to write."""
    home = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(home).free
    detail = f"{_gib(free)} free for runs in {root.absolute()}"
    if not os.access(home, os.W_OK):
        return Finding("disk", f"{home} may not be written", "set RELAX_RUNS to a folder of yours", MACHINE)
    if free < LEAST_DISK:
        return Finding("disk", detail, "free some, or set RELAX_RUNS to a folder on another disk", MACHINE)
    return Finding("disk", detail)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Weights travel through it, and Ray keeps its objects there."""
    if not path.is_dir():
        return Finding("shared memory", "no /dev/shm: weights go through the run directory")
    usage = shutil.disk_usage(path)
    detail = f"{_gib(usage.free)} of {_gib(usage.total)} free in {path}"
    if usage.free < LEAST_SHARED:
        fix = "remove what lies there, or give the container more (docker run --shm-size=4g)"
        return Finding("shared memory", detail, fix, MACHINE)
    return Finding("shared memory", detail)


def loopback() -> Finding:
    """Workers listen on ports of 127.0.0.1."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
            return Finding("loopback", f"port {probe.getsockname()[1]} of 127.0.0.1 is free")
    except OSError as error:
        fix = "free ports: see `ss -tan` and net.ipv4.ip_local_port_range"
        return Finding("loopback", f"no port of 127.0.0.1 can be opened: {error.strerror}", fix, MACHINE)


def devices() -> Finding:
    """What torch sees."""
    script = (
        "import torch; n = torch.cuda.device_count(); "
        "print(torch.__version__, *(torch.cuda.get_device_name(i) for i in range(n)), sep='|')"
    )
    said, failure = probe(sys.executable, script)
    if failure:
        return Finding(
            "devices", f"torch can't be imported here ({failure}): fine if engine and trainer have their own python"
        )
    version, *names = said.split("|")
    return Finding("devices", f"torch {version}, {', '.join(names) or 'no GPU: runs go on the CPU'}")


def has_gpus(devices: Path = Path("/dev")) -> bool:
    """Whether this process may use an NVIDIA GPU, asked of nobody: no driver is loaded for it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(devices.glob("nvidia[0-9]*"))


def count_gpus() -> int:
    """As `has_gpus` looks."""
    return len(seen_gpus(os.environ))


def free_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that further processes of this machine, or of this container, may have; what caches files can be had."""
    available: int = psutil.virtual_memory().available
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        told = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit
        return available
    cached = sum(int(told.get(name, 0)) for name in ("active_file", "inactive_file"))
    return max(0, min(available, limit - used + cached))


def device_memory() -> dict[str, int]:
    """Bytes of each GPU that torch sees, by its name in a plan; empty where there is no torch or none."""
    try:
        import torch
    except ImportError:
        return {}
    if not has_gpus():
        return {}
    return {
        f"gpu:{number}": int(torch.cuda.get_device_properties(number).total_memory)
        for number in range(torch.cuda.device_count())
    }


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
