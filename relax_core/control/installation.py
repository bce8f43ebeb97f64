# SPDX-License-Identifier: Apache-2.0
"""The installation as the doctor sees it: Python, packages, plugins, ray. Light: other interpreters import it too."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from relax_core.control.finding import SETUP, Finding, probe
from relax_core.plugins.catalogue import Catalogue
from relax_core.plugins.record import State


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
    broken = [record for record in catalogue.records if record.state is State.BROKEN]
    skipped = [f"{record.title} ({record.reason})" for record in catalogue.records if record.state is State.SKIPPED]
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
