# SPDX-License-Identifier: Apache-2.0
"""`relax plugins check`: does an installed plugin keep its promises? Handshake, import, options, then the conformance suites.

Suites run through pytest in another process (extra `relax-core[testing]`); this module never imports them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from relax_core.api.errors import RelaxError
from relax_core.plugins.catalogue import Catalogue
from relax_core.plugins.conformance import Subject, run_suites
from relax_core.plugins.describe import describe
from relax_core.plugins.record import Offered, Record, State

HEAVY = ("torch", "ray", "pydantic", "transformers", "tensorflow", "jax", "vllm", "sglang")
"""What no plugin's listing may import: every `relax` command lists all plugins."""
_IMPORT_S = 120.0


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at."""

    distribution: str
    subject: str
    """`reward half`, or empty for the plugin as a whole."""
    name: str
    verdict: Verdict
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": str(self.verdict)}


def check(catalogue: Catalogue, records: Sequence[Record], files: Sequence[str] = ()) -> Iterator[Check]:
    """Every check of these plugins, cheap ones first."""
    for record in records:
        yield _handshake(record)
        if record.state is State.OK and not record.file:
            yield _light(record)
    offered = [(record, item) for record in records for item in record.components]
    sound: list[Subject] = []
    for record, item in offered:
        opened = _opens(catalogue, record, item)
        yield opened
        if opened.verdict is Verdict.PASSED:
            sound.append(Subject(record.distribution, *item, record.name))
    for subject, name, verdict, detail in run_suites(sound, files):
        yield Check(subject.distribution, subject.title, name, Verdict(verdict), detail)


def _handshake(record: Record) -> Check:
    verdict = {State.OK: Verdict.PASSED, State.BROKEN: Verdict.FAILED, State.SKIPPED: Verdict.FAILED}[record.state]
    if record.reason.startswith("switched off"):
        verdict = Verdict.SKIPPED
    return Check(record.distribution, "", "handshake", verdict, record.frames + record.reason)


def _light(record: Record) -> Check:
    detail = heavy_imports(record.module)
    return Check(record.distribution, "", "light_import", Verdict.FAILED if detail else Verdict.PASSED, detail)


def heavy_imports(module: str) -> str:
    """Import a plugin's module alone in a fresh interpreter: what is wrong with that, or empty."""
    code = f"import sys; sys.path[:] = {sys.path!r}; import {module}; print(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing {module} takes more than {_IMPORT_S:.0f} s; import heavy libraries where they are used"
    if done.returncode:
        return done.stderr.strip()
    heavy = ", ".join(done.stdout.split())
    return f"{module} imports {heavy}; name targets as strings and import there" if heavy else ""


def _opens(catalogue: Catalogue, record: Record, item: Offered) -> Check:
    """The component is imported, of its kind, and its options can be told."""
    title = f"{item.kind} {item.component.name}"
    try:
        described = describe(catalogue, item.kind, f"{record.name}:{item.component.name}")
    except RelaxError as error:
        return Check(record.distribution, title, "target", Verdict.FAILED, getattr(error, "frames", "") + str(error))
    except Exception as error:
        return Check(record.distribution, title, "options", Verdict.FAILED, f"its options can't be read: {error}")
    if bare := [option["name"] for option in described["options"] if not option["doc"]]:
        detail = f"undocumented: {', '.join(bare)}; write a string under each field"
        return Check(record.distribution, title, "options", Verdict.FAILED, detail)
    return Check(record.distribution, title, "options", Verdict.PASSED)
