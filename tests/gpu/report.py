# SPDX-License-Identifier: Apache-2.0
"""The report of the GPU check: results read from the files that the parts wrote, as one JSON document and one Markdown page."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.parts import MarkedTest

SCHEMA = 1
SAID = 2000
"""Characters of a failure that the report keeps; the log has all of them."""


@dataclass(slots=True)
class Result:
    """The outcome of one part."""

    name: str
    kind: str
    command: str
    status: str
    """`passed`, `failed`, `timed out`, or `no results` if the command ended without its results."""
    seconds: float
    log: str
    passed: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)
    """Test and error text of each failed test."""
    skipped: list[dict[str, str]] = field(default_factory=list)
    """Test and reason of each test that did not run."""
    ratios: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    """The table of a benchmark."""


def read_tests(file: Path, result: Result) -> None:
    """Fill a result from a JUnit file of pytest."""
    for case in ElementTree.parse(file).iter("testcase"):
        test = f"{case.get('classname', '')}::{case.get('name', '')}"
        said = {child.tag: child.get("message") or child.text or "" for child in case}
        if wrong := said.get("failure") or said.get("error"):
            result.failures.append({"test": test, "said": wrong[:SAID]})
        elif "failure" in said or "error" in said:
            result.failures.append({"test": test, "said": ""})
        elif "skipped" in said:
            result.skipped.append({"test": test, "why": said["skipped"][:SAID]})
        else:
            result.passed += 1


def read_benchmark(file: Path, result: Result) -> None:
    """Fill a result from a benchmark's document. Columns such as `step / floor` are ratios."""
    result.rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    for row in result.rows:
        what = ", ".join(value for value in row.values() if isinstance(value, str))
        for name, value in row.items():
            if " / " in name and isinstance(value, float):
                result.ratios.append({"of": what, "ratio": name, "value": value})


def document(
    when: str, commit: str, facts: Mapping[str, Any], results: Sequence[Result], wanting: Sequence[MarkedTest]
) -> dict[str, Any]:
    """Return the report. `wanting`: tests that need more GPUs than the machine has."""
    return {
        "schema": SCHEMA, "when": when, "commit": commit, **facts, "parts": [asdict(result) for result in results],
        "wanting_gpus": [asdict(test) for test in wanting],
    }  # fmt: skip


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a page: machine, one line for each part, ratios, and everything that did not pass or run."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    machine, parts = report["machine"], report["parts"]
    names = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in machine["gpus"])
    yield from ("# GPU check", "", f"{report['when']}, commit {report['commit'] or 'unknown'}.", "")
    yield f"{names}; driver {machine.get('driver') or 'unknown'}, CUDA {machine.get('cuda')}, torch {machine['torch']}, "
    yield from (f"Python {machine['python']}, {machine['cores']} cores, {machine['system']}.", "")
    yield from ("| part | result | passed | failed | skipped | seconds |", "|---|---|---|---|---|---|")
    for part in parts:
        counts = (
            [part["passed"], len(part["failures"]), len(part["skipped"])] if part["kind"] == "tests" else ["", "", ""]
        )
        yield f"| {part['name']} | {part['status']} | {' | '.join(map(str, counts))} | {part['seconds']:.0f} |"
    if ratios := [(part["name"], ratio) for part in parts for ratio in part["ratios"]]:
        yield from ("", "| benchmark | row | ratio | value |", "|---|---|---|---|")
        yield from (f"| {name} | {each['of']} | {each['ratio']} | {each['value']:.3g} |" for name, each in ratios)
    if wanting := report["wanting_gpus"]:
        yield from ("", "Not run, for want of GPUs:", "")
        yield from (f"- {test['file']}::{test['name']} needs {test['gpus']}" for test in wanting)
    for title, key, said in (("Skipped", "skipped", "why"), ("Failed", "failures", "said")):
        if found := [each for part in parts for each in part[key]]:
            yield from ("", f"{title}:", "")
            yield from (f"- {each['test']}: {each[said].splitlines()[0] if each[said] else ''}" for each in found)
    yield from ("", "| package | version |", "|---|---|")
    yield from (f"| {name} | {version} |" for name, version in report["packages"].items())
