# SPDX-License-Identifier: Apache-2.0
"""A run that a test strikes is not over before: its environment lets no answer begin once so many steps are done.

`gated(run)` are words of `relax train`; `shut(run, steps)` shuts the gate, `open_gate(run)` opens it. A gate that was never
shut is open.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from relax_core.api import Action, Environment, Options, Step, Task

POLL_S = 0.1


class GatedOptions(Options):
    run: str
    """Directory of the run; the gate is a file beside it with the number of steps."""


class GatedEnvironment(Environment[GatedOptions]):
    """One answer to one prompt, when the gate lets it begin."""

    in_process = True

    async def reset(self, task: Task, seed: int) -> None:
        run = Path(self.options.run)
        while _is_shut(run):
            await asyncio.sleep(POLL_S)

    async def step(self, action: Action) -> Step:
        return Step("", done=True)


def gated(run: Path) -> tuple[str, str]:
    return f'plugins=["{Path(__file__)}"]', f'environment={{name="gated", run="{run}", timeout_s=3600}}'


def shut(run: Path, steps: int) -> None:
    """No answer begins once this many steps are written."""
    written = _gate(run).with_suffix(".written")
    written.write_text(str(steps))
    written.replace(_gate(run))


def open_gate(run: Path) -> None:
    _gate(run).unlink()


def _gate(run: Path) -> Path:
    return run.with_name(f"{run.name}.gate")


def _is_shut(run: Path) -> bool:
    try:
        steps = int(_gate(run).read_text())
        return (run / "metrics.jsonl").read_text().count('"reward/mean"') >= steps
    except FileNotFoundError:
        return False
