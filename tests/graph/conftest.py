# SPDX-License-Identifier: Apache-2.0
"""Whole runs through the command line, on both runners, over one tiny model that is built once."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

import pytest

from tests.graph.forked_relax import RelaxProcess, fork_relax
from tests.shared_folder import shared_folder

if TYPE_CHECKING:
    from tests.graph.ray_run import Start

RUN_S = 840
SMALL = ("rollout.groups_per_step=4", "rollout.group_size=4", "eval.every=0")
"""Words of `relax train` for steps of sixteen samples without an evaluation."""


@dataclass(frozen=True)
class Ran:
    """One finished `relax` process."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.out))


Relax = Callable[..., Ran]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model and data; its recipe is `recipe.toml`. Built in this process, which has imported torch."""
    import torch

    from relax_contrib.recipes.quickstart.build import TARGET, build
    from relax_core.control.prepare import find_recipe

    def build_quickstart(folder: Path) -> None:
        with torch.random.fork_rng(devices=[]):
            assert build(folder, 0) >= TARGET
        (folder / "recipe.toml").write_text(find_recipe("quickstart").toml())

    return shared_folder(tmp_path_factory, "quickstart", build_quickstart)


@pytest.fixture(scope="session")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows just the form of an answer to `?`, a task for each letter, and `recipe.toml`."""
    from relax_contrib.recipes.guess_number.build import build
    from relax_core.control.prepare import find_recipe

    def build_game(folder: Path) -> None:
        build(folder, 0, steps=60)
        (folder / "recipe.toml").write_text(find_recipe("guess-number").toml())

    return shared_folder(tmp_path_factory, "guess-number", build_game)


@pytest.fixture(scope="session")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deterministic run without faults, which runs with faults must end like."""
    from tests.graph.exact import train_exactly

    def train(folder: Path) -> None:
        train_exactly(tiny / "recipe.toml", folder / "run")

    return shared_folder(tmp_path_factory, "whole", train) / "run"


@pytest.fixture
def relax(tmp_path: Path) -> Iterator[Relax]:
    """Run `relax` in a directory of its own."""
    with relax_in(tmp_path) as relax:
        yield relax


@pytest.fixture
def relax_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Relax:
    """Run `relax` inside this process, which saves the start of an interpreter: refusals, views, inline runs."""
    from relax_core.cli.main import main
    from relax_core.control.run import SIGNALS

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("relax_core.cli.main.EVERY_S", 3600.0)  # lines about waits would depend on the machine's speed

    def call(*arguments: str | Path) -> Ran:
        monkeypatch.setattr(sys, "argv", ["relax", *map(str, arguments)])
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        capfd.readouterr()
        try:
            with pytest.raises(SystemExit) as ended:
                copy_context().run(main)  # `main` sets context variables until its process ends
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if "torch" in sys.modules:  # a deterministic run asks for it
                sys.modules["torch"].use_deterministic_algorithms(False)
        code = ended.value.code
        assert isinstance(code, int)
        return Ran(code, *capfd.readouterr())

    return call


@pytest.fixture
def train_here(relax_here: Relax) -> Relax:
    """Train with the inline runner inside this process."""
    return lambda *arguments: relax_here("train", *arguments, "--runner", "inline", "--json")


@contextmanager
def relax_in(directory: Path) -> Iterator[Relax]:
    """Run `relax` in this directory; everything that it started must be gone when it ends."""

    def call(*arguments: str | Path, timeout_s: float = RUN_S, **env: str) -> Ran:
        with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            process = start_relax(arguments, directory, env, out, err)
            try:
                process.wait(timeout_s)
            finally:
                process.kill()
                code = process.wait()
            out.seek(0)
            err.seek(0)
            return Ran(code, out.read(), err.read())

    yield call
    assert survivors(directory) == []


def start_relax(
    arguments: Sequence[str | Path], directory: Path, env: Mapping[str, str], out: IO[str], err: IO[str]
) -> RelaxProcess | subprocess.Popen[str]:
    """Start `relax` in a session of its own.

    Tests fork the process. Start an interpreter for benchmarks, for more environment variables, which modules may read at
    import, and on a machine with GPUs, since CUDA does not survive a fork.
    """
    if env or "PYTEST_VERSION" not in os.environ or Path("/dev/nvidiactl").exists():
        return subprocess.Popen(
            command(*arguments), cwd=directory, env=environment(**env), stdout=out, stderr=err, start_new_session=True,
            text=True,
        )  # fmt: skip
    return fork_relax([*map(str, arguments)], directory, environment(), out.fileno(), err.fileno())


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "relax_core", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **more}


def survivors(directory: Path) -> list[str]:
    """Command lines of processes that still work in this directory."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def exported(run: Path) -> str:
    """What the bytes of a run's exported weights add up to: equal for equal weights, and short where a test shows it."""
    return file_digest(run / "export/model.safetensors")


def file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts runs that a test watches."""
    with started_runs(tmp_path) as start:
        yield start


@contextmanager
def started_runs(directory: Path) -> Iterator[Start]:
    """Start runs in this directory; what they leave behind is an error, also where a test fails and they are killed."""
    from tests.graph.ray_run import Start, until

    start = Start(directory)
    try:
        yield start
    finally:
        for run in start.started:
            run.kill()
        until(lambda: survivors(directory) == [], lambda: f"processes are gone: {survivors(directory)}", 120)
