# SPDX-License-Identifier: Apache-2.0
"""`relax.train`, `evaluate`, `export` and `bundle` for Python and notebooks, which do what the verbs of the command do.

All but `train` call the function that an installed plugin offers for its command.
"""

from __future__ import annotations

import hashlib
import json
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, TypeVar, cast

from relax_core.api.errors import ConfigError
from relax_core.api.events import Event
from relax_core.control.prepare import prepare
from relax_core.control.run import Receive, run
from relax_core.observe.console import INTERRUPTS, Interrupts
from relax_core.observe.files import disk_errors
from relax_core.observe.run_directory import runs_root
from relax_core.registry.commands import Commands
from relax_core.rewards.host import pack
from relax_core.views.display import LiveDisplay
from relax_core.views.run import RunView, open_run

T = TypeVar("T")
Reward = str | Mapping[str, Any] | Callable[..., Any]
Tasks = str | Path | Iterable[Mapping[str, Any]] | Any
"""A task file or dataset folder, rows, or an object that has `to_parquet`, such as a `datasets.Dataset` or a data frame."""
PYTHON = "relax.python"
"""Group of the entry points with which a plugin offers its commands to Python: the command's name, and a function."""
TASKS = "tasks"
"""Folder under the runs folder for tasks passed from Python; a file is named after its content."""


def train(
    *sources: str | Path | Mapping[str, Any],
    tasks: Tasks | None = None,
    eval_tasks: Tasks | Mapping[str, Tasks] | None = None,
    rewards: Sequence[Reward] = (),
    observers: Sequence[Callable[[Event], object]] = (),
    runner: str | None = None,
    run_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    show: bool = True,
) -> RunView:
    """Train to the end and return the run.

    `sources`: TOML files, recipe names or mappings; later ones override earlier ones. `tasks`: the tasks to train on, in
    place of `data.train`; rows are written to a file, which a resumed run reads again. `eval_tasks`: the same for an
    evaluation set named `eval`, or by name for several sets. `rewards`: names of components, tables, or functions
    `fn(task, trajectory) -> float`, each of which runs in its own process. A function with a parameter `completions` is
    called as in TRL. `observers`: functions that get each event of `relax_core.api.events` that has a hook, in a thread
    of their own; their errors are logged and do not end the run. Raises the errors that the command line prints.
    """
    functions = pack(reward for reward in rewards if callable(reward))
    layers = [*sources, *_given(rewards, functions, runner), *_data(tasks, eval_tasks)]
    prepared = prepare(layers, overrides, run_dir=Path(run_dir) if run_dir else None, functions=functions)
    for number, observer in enumerate(observers):
        prepared.catalogue.observe(f"observer {number} ({getattr(observer, '__name__', 'callable')})", observer)
    display = LiveDisplay(prepared.launch.run_id, prepared.config.steps) if show else None
    _in_thread(lambda: run(prepared, display, obey=_obey_caller))
    return open_run(prepared.directory.path)


def export(
    run: str | Path | None,
    out: str | Path,
    *,
    step: int | None = None,
    overrides: Sequence[str] = (),
    push_to: str = "",
    public: bool = False,
) -> Path:
    """Write the model of a run's checkpoint as a Hugging Face folder, as `relax export` does; return the folder.

    `run`: a directory or name; None: the latest run. `step`: the checkpoint; None: the newest. `push_to`: a model of the
    Hugging Face Hub, USER/NAME, to which the folder is also sent; a new one is private unless `public`. Raises the
    errors of the command, and ConfigError naming the plugin to install if no installed plugin has the command.
    """
    write = _of_plugin("export")
    name = None if run is None else str(run)
    return cast(Path, _in_thread(partial(write, name, Path(out), step, overrides, push_to, public)).directory)


def evaluate(
    target: str | Path,
    *sources: str | Path | Mapping[str, Any],
    against: str | Path | None = None,
    out: str | Path | None = None,
    rewards: Sequence[Reward] = (),
    overrides: Sequence[str] = (),
) -> tuple[Any, list[Any]]:
    """Evaluate a model folder, a checkpoint, a run or RUN@STEP, as `relax eval` does.

    Return the result, and its comparison with that of `against` on each set: another target, or the folder of an earlier
    result; empty without `against`. `sources`: TOML files or mappings over the run's configuration. `out`: a new
    folder; None: a new one under ./evals. `rewards`: as in `train`, in place of the configuration's; a run that was
    trained with functions needs the same functions again. Raises the errors of the command, and ConfigError naming the
    plugin to install if no installed plugin has the command.
    """
    measure = _of_plugin("eval")
    functions = pack(reward for reward in rewards if callable(reward))
    layers = [*sources, *_given(rewards, functions, None)]
    folder = None if out is None else Path(out)
    other = None if against is None else str(against)
    result, comparisons = _in_thread(partial(measure, str(target), layers, overrides, other, folder, functions))
    return result, comparisons


def bundle(run: str | Path | None = None, out: str | Path | None = None, *, samples: bool = False) -> Path:
    """Pack a run's evidence into one archive without secrets, as `relax bundle` does; return the archive.

    Raises ConfigError naming the plugin to install if no installed plugin has the command.
    """
    return cast(Path, _of_plugin("bundle")(run, out, samples=samples))


def _of_plugin(command: str) -> Callable[..., Any]:
    """Return the function with which a plugin offers its command to Python.

    Raises ConfigError naming the plugin to install if no installed plugin has the command.
    """
    plugin = distribution(Commands().find(command).record.distribution)
    entries = plugin.entry_points.select(group=PYTHON, name=command)
    if not entries:
        raise ConfigError("command", repr(command), f"{plugin.name} offers it only as `relax {command}`")
    return cast(Callable[..., Any], entries[command].load())


def _given(rewards: Sequence[Reward], functions: Mapping[str, bytes], runner: str | None) -> list[dict[str, Any]]:
    given: dict[str, Any] = {}
    if rewards:
        given["rewards"] = [*functions, *(reward for reward in rewards if not callable(reward))]
    if runner:
        given["run"] = {"runner": runner}
    return [given] if given else []


def _data(tasks: Tasks | None, eval_tasks: Tasks | Mapping[str, Tasks] | None) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = []
    if tasks is not None:
        layers.append({"data": {"train": _file_of(tasks, "tasks")}})
    if eval_tasks is not None:
        sets = eval_tasks if isinstance(eval_tasks, Mapping) else {"eval": eval_tasks}
        found = [{"name": name, "path": _file_of(one, f"eval_tasks {name}")} for name, one in sets.items()]
        layers.append({"eval": {"sets": found}})
    return layers


def _file_of(tasks: Tasks, field: str) -> str:
    """Return the path of a file with these tasks; write rows to a file first. Raises ConfigError."""
    if isinstance(tasks, str | Path):
        return str(tasks)
    folder = runs_root().absolute() / TASKS
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with disk_errors(folder), tempfile.TemporaryDirectory(dir=folder) as scratch:
        written = Path(scratch) / "rows"
        if hasattr(tasks, "to_parquet"):
            suffix = ".parquet"
            tasks.to_parquet(str(written))
        else:
            suffix = ".jsonl"
            written.write_text("".join(f"{line}\n" for line in _lines(tasks, field)), encoding="utf-8")
        with written.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        kept = folder / f"{digest[:16]}{suffix}"
        written.replace(kept)
    return str(kept)


def _lines(rows: Iterable[Mapping[str, Any]], field: str) -> Iterator[str]:
    fix = "give rows such as {'prompt': ..., 'answer': ...}, of text, numbers, lists and mappings"
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"{field}, row {number}", type(row).__name__, fix)
        try:
            yield json.dumps(dict(row), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{field}, row {number}", str(error), fix) from error


def _obey_caller(receive: Receive) -> AbstractContextManager[None]:
    return INTERRUPTS.get().obeyed_by(partial(receive, signal.SIGINT))


def _in_thread(call: Callable[[], T]) -> T:
    """Return the result of a call in a thread, because a notebook's own thread already has an event loop.

    Each interrupt is passed to the call; once the call has ended, KeyboardInterrupt is raised.
    """
    ended: Future[T] = Future()
    interrupts = Interrupts()

    def conduct() -> None:
        INTERRUPTS.set(interrupts)
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    thread = threading.Thread(target=conduct, name="relax", daemon=True)
    if threading.current_thread() is not threading.main_thread():  # no other thread gets signals
        thread.start()
        return ended.result()
    before = signal.signal(signal.SIGINT, lambda *_: interrupts.send())
    try:
        thread.start()
        wait([ended])
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts.sent:
        raise KeyboardInterrupt
    return ended.result()
