# SPDX-License-Identifier: Apache-2.0
"""Check that the locks in constraints/ are complete, and that this environment holds the versions of its lock.

A lock, `constraints/NAME.txt`, holds every version of one environment. `scripts/lock` writes it from `NAME.in` and
`NAME.no-deps.in`, which hold the versions that people chose, and from the requirements of our projects. `.ci/lint` runs this
check in the environment of `scripts/environment`, whose lock is `cpu.txt`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "constraints"
PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.!]+)")
UNLOCKED = re.compile(r"(pip|setuptools|uv|relax-.*|triton|nvidia-.*|cuda-.*)")
"""Distributions that need no line in cpu.txt: installers, our projects, and what a build of torch for CUDA requires."""


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file without comments and empty lines; none if there is no such file."""
    if not path.exists():
        return []
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def versions_of(lock: Path) -> dict[str, Version]:
    """Return the versions in a lock by canonical name."""
    pins = [pin for line in lines_of(lock) if (pin := PIN.fullmatch(line))]
    return {canonicalize_name(pin["name"]): Version(pin["version"]) for pin in pins}


def malformed(lock: Path) -> Iterator[str]:
    for line in lines_of(lock):
        if not PIN.fullmatch(line):
            yield f"{lock.name}: {line!r} is not name==version"


def unmet(lock: Path, requirements: Mapping[str, str]) -> Iterator[str]:
    """Report requirements that a lock lacks or contradicts. The mapping gives the file that each of them stands in."""
    versions = versions_of(lock)
    for text, source in requirements.items():
        requirement = Requirement(text)
        version = versions.get(canonicalize_name(requirement.name))
        if version is None:
            yield f"{lock.name}: no {requirement.name}, which {source} requires"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{lock.name}: {requirement.name}=={version}, but {source} requires {text}"


def requirements_of(lock: Path) -> dict[str, str]:
    """Return the requirements that a lock is written from, and the file of each.

    Only an engine's lock is checked against the requirements of our projects: this check does not run in its environment.
    """
    found = {line: source.name for source in LOCKS.glob(f"{lock.stem}.*in") for line in lines_of(source)}
    engine = ROOT / "plugins" / f"relax-plugin-{lock.stem.partition('-')[0]}"
    if engine.is_dir():
        for source in (ROOT / "pyproject.toml", engine / "pyproject.toml"):
            wanted = tomllib.loads(source.read_text(encoding="utf-8"))["project"]["dependencies"]
            found |= {line: str(source.relative_to(ROOT)) for line in wanted if not line.startswith("relax-")}
    return found


def differing(lock: Path) -> Iterator[str]:
    """Report installed distributions whose version is not the lock's. Local parts such as `+cpu` do not count."""
    versions = versions_of(lock)
    installed = {canonicalize_name(each.name): Version(Version(each.version).public) for each in distributions()}
    for name, version in sorted(installed.items()):
        if not UNLOCKED.fullmatch(name) and versions.get(name) != version:
            locked = f"{name}=={versions[name]}" if name in versions else f"no {name}"
            yield f"{lock.name}: {locked}, but {name}=={version} is installed in {sys.prefix}"


def main() -> int:
    faults: list[str] = []
    for name in sorted({source.name.partition(".")[0] for source in LOCKS.iterdir()}):
        lock = LOCKS / f"{name}.txt"
        faults += [*malformed(lock), *unmet(lock, requirements_of(lock))]
    faults += differing(LOCKS / "cpu.txt")
    if faults:
        print(*faults, "run scripts/lock, or install anew: rm -r .venv && scripts/environment", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
