# SPDX-License-Identifier: Apache-2.0
"""Emergency checkpoints: the state of the actor's ranks, saved where something else failed and the run starts again as a whole.

The hub with the bus may be dead, so both sides see files alone: the ranks write into a directory of their own, and whoever
prepares the next start makes a checkpoint of it, once the ledger on disk and the record of the run reach its step. Nothing
that was trained is trained again then. With a critic there is none: the rows that it still has to learn are gone with the bus.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

from relax_core.api.errors import RelaxError
from relax_core.api.weights import Version
from relax_core.bus.ledger_file import FILE, add_checkpoint
from relax_core.config.run_config import RunContext
from relax_core.observe.documents import disk_errors, sync_to_disk
from relax_core.roles.checkpoint import PARTIAL, SCHEMA, complete, step_of
from relax_core.roles.checkpoint_files import checksums, write_list
from relax_core.roles.rank_group import RankGroup

STATE = "state.json"


async def save_in_emergency(context: RunContext, trainer: RankGroup, version: Version) -> None:
    """Let the ranks save their state, which is that of `version`, within the grace of a stop. What hinders it is ignored:
    the run goes on from the checkpoint before."""
    directory = _directory(context.run_dir, context.epoch)
    try:
        with context.changing_files():
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        async with asyncio.timeout(context.config.checkpoint.grace_s):
            await trainer.call("abort_update")
            await trainer.call("save", str(directory / "trainer"))
        known = {"schema": SCHEMA, "step": version.step, "incarnation": version.incarnation, "listed": True}
        (directory / STATE).write_text(json.dumps(known))
    except (RelaxError, TimeoutError, OSError):
        shutil.rmtree(directory, ignore_errors=True)


def take_up_emergency(run_dir: Path, epoch: int, recorded: int) -> str:
    """Make a checkpoint of what the ranks of this start saved in an emergency, and say so; empty where there is nothing.

    The ledger must know its step, and the metrics of all steps up to it must be on disk: steps up to `recorded` are. Nobody
    writes in the run directory meanwhile. Raises InfrastructureError where the disk or the ledger can't be read or written.
    """
    directory = _directory(run_dir, epoch)
    if not (directory / STATE).is_file():
        return ""
    state = json.loads((directory / STATE).read_text())
    step, incarnation = int(state["step"]), int(state["incarnation"])
    checkpoints = complete(run_dir / "checkpoints")
    if step > recorded or step <= (step_of(checkpoints[-1]) if checkpoints else 0):
        return ""
    if not add_checkpoint(run_dir / FILE, step, incarnation, directory / FILE):
        return ""
    final = run_dir / "checkpoints" / f"step-{step:06d}"
    with disk_errors(final):
        write_list(directory, checksums(directory))
        os.replace(directory, final)
        sync_to_disk(final.parent)
    return f"the actor's ranks saved step {step} when the run failed elsewhere: it goes on from there"


def _directory(run_dir: str | Path, epoch: int) -> Path:
    """Return the directory in which the ranks of one start of a run save; it goes with all that is half-written."""
    return Path(run_dir) / "checkpoints" / f"{PARTIAL}emergency-{epoch}"
