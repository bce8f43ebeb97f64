# SPDX-License-Identifier: Apache-2.0
"""What every benchmark does around its measuring: refuses a busy machine, notes machine and versions, prints the result.

The result is one JSON document on stdout and one Markdown table after it, or in files where `--out` names a folder.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("relax-core", "numpy", "torch", "ray", "TransferQueue", "tensordict", "pyzmq", "xxhash")
BUSY_LOAD = 0.5
"""Of one processor: a machine with more to do measures its other work."""

Row = Mapping[str, Any]


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--anyway", action="store_true", help="measure also on a machine that is in use; the report says so"
    )
    made.add_argument("--out", type=Path, help="folder for <name>.json and <name>.md; else both are printed")
    made.add_argument("--repeats", type=int, default=5, help="of which the median is reported")
    return made


def begin(options: argparse.Namespace) -> dict[str, Any]:
    """The set-up; ends the process with 4 where the machine is busy, and with 2 where `--out` is no folder."""
    if options.out is not None and options.out.suffix:
        print(f"--out {options.out}: name a folder, which gets <name>.json and <name>.md", file=sys.stderr)
        raise SystemExit(2)
    load = os.getloadavg()[0]
    if load > BUSY_LOAD and not options.anyway:
        print(
            f"the machine is in use: load {load:.1f}, at most {BUSY_LOAD}; wait for it, or add --anyway",
            file=sys.stderr,
        )
        raise SystemExit(4)
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "processor": _processor(), "cores": os.cpu_count(), "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "system": platform.platform(), "load_at_start": round(load, 2),
        },
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "options": {name: str(value) for name, value in vars(options).items()},
    }  # fmt: skip


def finish(name: str, set_up: Mapping[str, Any], rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print or write the document and the table."""
    document = json.dumps({"benchmark": name, **set_up, "rows": rows}, indent=1)
    markdown = table(rows)
    if options.out is None:
        print(document, markdown, sep="\n\n")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(document + "\n")
    (options.out / f"{name}.md").write_text(markdown + "\n")
    print(markdown)


def recorded(name: str, options: argparse.Namespace, part: str = "rows") -> list[Row]:
    """Return what `--out` holds of earlier runs of a benchmark."""
    file = options.out / f"{name}.json" if options.out else None
    return list(json.loads(file.read_text(encoding="utf-8"))[part]) if file and file.is_file() else []


def table(rows: Sequence[Row]) -> str:
    """Markdown; columns are the keys of the first row."""
    names = list(rows[0]) if rows else []
    lines = [names, ["---"] * len(names), *([_shown(row.get(name)) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def median(repeats: int, once: Callable[[], float]) -> float:
    """Of several measurements, after one that counts for nothing."""
    once()
    return sorted(once() for _ in range(repeats))[repeats // 2]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
