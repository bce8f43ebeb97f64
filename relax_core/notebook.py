# SPDX-License-Identifier: Apache-2.0
"""`relax.train`, `relax.export` and `relax.bundle` for Python and notebooks, which do what the verbs of the command do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from relax_core.control.prepare import Prepared, prepare
from relax_core.control.run import run
from relax_core.diagnostics.export import export as export_checkpoint
from relax_core.rewards.host import pack
from relax_core.views.bundle import write_bundle
from relax_core.views.display import LiveDisplay
from relax_core.views.report import write_report
from relax_core.views.run import RunView, open_run

Reward = str | Mapping[str, Any] | Callable[..., float]


def train(
    *sources: str | Path | Mapping[str, Any],
    rewards: Sequence[Reward] = (),
    runner: str | None = None,
    run_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    show: bool = True,
) -> RunView:
    """Train to the end and return the run.

    `sources`: TOML files, recipe names or mappings; later ones override earlier ones. `rewards`: names of components,
    tables, or functions `fn(task, trajectory) -> float`, each of which runs in its own process. Raises the errors that
    the command line prints.
    """
    functions = pack(reward for reward in rewards if callable(reward))
    layers = [*sources, *_given(rewards, functions, runner)]
    prepared = prepare(layers, overrides, run_dir=Path(run_dir) if run_dir else None, functions=functions)
    _in_thread(prepared, show)
    write_report(prepared.directory.path)
    return open_run(prepared.directory.path)


def export(run: str | Path | None, out: str | Path, *, step: int | None = None, overrides: Sequence[str] = ()) -> Path:
    """Write the model of a run's checkpoint as a Hugging Face folder, as `relax export` does; return the folder.

    `run`: a directory or name; None: the latest run. `step`: the checkpoint; None: the newest. Raises the errors of
    `relax_core.diagnostics.export.export`.
    """
    name = None if run is None else str(run)
    with ThreadPoolExecutor(1) as pool:  # a notebook's own thread already has an event loop
        return pool.submit(export_checkpoint, name, Path(out), step, overrides).result().directory


def bundle(run: str | Path | None = None, out: str | Path | None = None, *, samples: bool = False) -> Path:
    """Pack a run's evidence into one archive without secrets, as `relax bundle` does; return the archive."""
    return write_bundle(open_run(run), None if out is None else Path(out), samples).file


def _given(rewards: Sequence[Reward], functions: Mapping[str, bytes], runner: str | None) -> list[dict[str, Any]]:
    given: dict[str, Any] = {}
    if rewards:
        given["rewards"] = [*functions, *(reward for reward in rewards if not callable(reward))]
    if runner:
        given["run"] = {"runner": runner}
    return [given] if given else []


def _in_thread(prepared: Prepared, show: bool) -> None:
    """Run in a thread, because a notebook's own thread already has an event loop.

    An interrupt of the caller stops the run, as Ctrl-C does on the command line.
    """
    display = LiveDisplay(prepared.launch.run_id, prepared.config.steps) if show else None
    failed: list[BaseException] = []

    def conduct() -> None:
        try:
            run(prepared, display, signals=False)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=conduct, name="relax", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
