# SPDX-License-Identifier: Apache-2.0
"""Export of a checkpoint: `relax export` writes its model as a Hugging Face folder.

The trainer of the run loads the checkpoint and writes the folder, as at the end of a run. Nothing is trained, and the
run directory is only read, so a live run can be exported too.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_plugin_hub.hub import check_account, push

from relax_core.api.errors import ConfigError
from relax_core.cli.terminal import run_to_end
from relax_core.launch import Catalogue, Launch, StageDirectory, compose, make_launch, plan, stage_directories
from relax_core.roles.checkpoint import DamagedCheckpoint, complete, read_whole, step_of
from relax_core.roles.rank_group import RankGroup
from relax_core.runs import check_new_folder, find_run
from relax_plugin_workbench.single_role import announce_functions, single_role


@dataclass(frozen=True, slots=True)
class Export:
    """A written export."""

    checkpoint: Path
    step: int
    """Step of the checkpoint, counted from the start of the whole run."""
    directory: Path
    """The Hugging Face folder."""
    notices: tuple[str, ...] = ()
    """Sentences for the user about a checkpoint whose bytes could not be checked."""
    url: str = ""
    """Address of the model at the Hugging Face Hub; empty if the model was not sent there."""


def export(
    run: str | None,
    out: Path,
    step: int | None = None,
    overrides: Sequence[str] = (),
    push_to: str = "",
    public: bool = False,
) -> Export:
    """Write the model of a run's newest checkpoint, or that of `step`, to the folder `out`, which must be new or empty.

    Adapters are folded in, and also written to `out/adapter` if the run exports them. `overrides`: changes of the run's
    configuration, such as `trainer.device=cpu`. `push_to`: a model of the Hugging Face Hub, USER/NAME, to which the
    folder is also sent; a new one is private unless `public`. Raises ConfigError if the checkpoint does not exist or
    does not fit the configuration, or the account may not be used, DamagedCheckpoint, and InfrastructureError if the
    folder can't be written or sent.
    """
    out = out.absolute()
    check_new_folder(out)
    if push_to:  # before the checkpoint is read, which may take long
        check_account(push_to)
    elif public:
        raise ConfigError("--public", "no model to send", "add --push-to USER/NAME")
    kept = checkpoints(find_run(run))
    chosen = max(kept) if step is None else step
    steps = f"the run has checkpoints of these steps: {', '.join(map(str, kept))}"
    if chosen not in kept:
        raise ConfigError("--step", str(chosen), steps)
    owner, checkpoint = kept[chosen]
    try:
        _, notices = read_whole(checkpoint)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{error}; choose another with --step: {steps}") from error
    given = configuration(owner)

    def passed(catalogue: Catalogue) -> None:
        announce_functions(given.get("rewards", ()), catalogue)

    # Task files are not needed, and may be on another machine.
    composed = compose([owner / "config.toml"], overrides, on_disk=False, passed=passed)
    config, catalogue = composed.config, composed.catalogue
    with tempfile.TemporaryDirectory(prefix="relax-export-") as scratch:  # the run directory is only read
        launch = make_launch(config, plan(config, catalogue), catalogue, Path(scratch))
        run_to_end(_write(launch, catalogue, f"{checkpoint}/trainer", str(out)))
    url = push(out, push_to, public, f"Step {chosen} of {owner.name}") if push_to else ""
    return Export(checkpoint, chosen, out, tuple(notices), url)


async def _write(launch: Launch, catalogue: Catalogue, checkpoint: str, out: str) -> None:
    """Start the run's trainer, load a checkpoint and export it."""
    async with single_role("actor", launch, catalogue) as context:
        trainer = await RankGroup.start(context, "actor")
        try:
            await trainer.call("load", checkpoint)
            await trainer.call("export", out)
        finally:
            await trainer.stop()


def configuration(owner: Path) -> dict[str, Any]:
    """Return the configuration in the directory of a run or stage. Raises ConfigError if the file can't be read."""
    source = owner / "config.toml"
    try:
        return tomllib.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(source), f"a file that can't be read ({error})", "restore the file") from error


def checkpoints(run_dir: Path) -> dict[int, tuple[Path, Path]]:
    """Return the directory of the run or stage and its checkpoint, by step of the whole run, in order of steps."""
    kept: dict[int, tuple[Path, Path]] = {}
    done = 0
    for stage in stage_directories(run_dir) or [StageDirectory(0, "", run_dir)]:
        kept |= {done + step_of(path): (stage.path, path) for path in complete(stage.path / "checkpoints")}
        account = stage.account()
        if account is None:
            break
        done += int(account["steps"])
    if not kept:
        fix = "a live run writes one with `relax checkpoint RUN`; a finished run has its model in export/"
        raise ConfigError("run", f"{run_dir}, which has no complete checkpoint", fix)
    return kept
