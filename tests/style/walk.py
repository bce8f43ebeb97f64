# SPDX-License-Identifier: Apache-2.0
"""Follow one sample, one publish and one override through the code, and count the functions and files that each passes.

Two steps of the quickstart run under a profile hook, first on the inline runner, then on the local runner with a hook in
each of its processes. A function lies on the way of a sample if it is called after the first issue of a group, and one of
its arguments or its result is a class that carries a sample. `forms.py` derives these classes from the annotations of the
contracts. Functions that see only encoded bytes are not counted. `house.py` prints the table.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.style.forms import CONTRACTS, Source, contract_forms, spread

ROOT = Path(__file__).resolve().parents[2]
CORE = "relax_core/"
SENTINEL = 0.00012345
OVERRIDES = ("steps=2", "eval.every=0", "rollout.groups_per_step=2", "max_staleness=0", "placement=colocate")
HOOK = """import sys
sys.path.append({root!r})
from tests.style.walk import follow_process
follow_process({folder!r})
"""
"""The `sitecustomize` of the local runner's processes."""
FIRST_ISSUE = "first-issue"
"""A file that exists from the first issue of a group on. The walk of a sample begins there: gold answers and the trainer's
trial rows pass the same functions before."""
FIRST = 3
"""Number of items of a collection that are looked at."""


@dataclass(frozen=True)
class Walk:
    """Functions as `file:name`, in the order of their first call."""

    functions: tuple[str, ...]

    @classmethod
    def of(cls, passed: Mapping[str, int], scope: str = "") -> Walk:
        """Sort functions by their time, and keep those of the files that begin with `scope`."""
        return cls(tuple(name for name in sorted(passed, key=lambda name: passed[name]) if name.startswith(scope)))

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(name.split(":")[0] for name in self.functions))

    @property
    def climbs(self) -> int:
        """Count the steps of the walk that go from a lower layer of the core back up to a higher one."""
        order = layers()
        rooms = [name.split("/")[1] for name in self.files if name.startswith(CORE) and name.count("/") > 1]
        heights = [order.index(room) for room in rooms if room in order]
        return sum(later < sooner for sooner, later in zip(heights, heights[1:], strict=False))


class Follower:
    """The functions of the core and the plugins that were passed, each with the time of its first call."""

    def __init__(
        self, carries: Callable[[Any], bool], note: Callable[[str, int], None] | None = None, begins: Path | None = None
    ) -> None:
        """`note` is called with each function when it is passed for the first time; `begins`: a file, as in `FIRST_ISSUE`."""
        self._carries, self._note, self._begins = carries, note, begins
        self.passed: dict[str, int] = {}
        self._done: set[CodeType] = set()

    def event(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if code in self._done:
            return
        if code.co_name.startswith("<") or not (file := source_file(code)):
            self._done.add(code)
            return
        try:
            if event == "return":
                met = self._carries(value)
            else:
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                met = any(self._carries(frame.f_locals.get(name)) for name in names)
        except Exception:  # an object that cannot be looked at yet carries nothing
            return
        if met and self._begins is not None and self._begins.exists():
            self._begins = None
        if met and self._begins is None:
            self._done.add(code)
            name, now = f"{file}:{code.co_qualname}", time.monotonic_ns()
            self.passed.setdefault(name, now)
            if self._note is not None:
                self._note(name, now)


def source_file(code: CodeType) -> str:
    """Return the path of a file of the core or of a plugin, relative to the checkout; empty for other code."""
    if not code.co_filename.startswith(f"{ROOT}/"):
        return ""
    file = code.co_filename[len(str(ROOT)) + 1 :]
    of_core = file.startswith(CORE) and not file.startswith(f"{CORE}testing/")
    return file if of_core or (file.startswith("plugins/") and "/src/" in file) else ""


def watch(*followers: Follower) -> None:
    """Show every call and return of this thread and of all threads that begin from now on to these followers."""

    def hook(frame: FrameType, event: str, value: Any) -> None:
        if event == "call" or event == "return":
            for follower in followers:
                follower.event(frame, event, value)

    threading.setprofile(hook)
    sys.setprofile(hook)


@contextmanager
def profiled(*followers: Follower) -> Iterator[None]:
    watch(*followers)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def follow_process(folder: str) -> None:
    """Follow what this process and its forks pass, and append each function to a file of the folder."""

    def note(walk: str) -> Callable[[str, int], None]:
        def write(name: str, now: int) -> None:
            with open(f"{folder}/{os.getpid()}.{walk}", "a", encoding="utf-8") as file:
                file.write(f"{now} {name}\n")

        return write

    forms = json.loads(Path(folder, "forms.json").read_text(encoding="utf-8"))
    watch(
        *(Follower(is_form(frozenset(found)), note(walk), begins(walk, Path(folder))) for walk, found in forms.items())
    )


def begins(walk: str, folder: Path) -> Path | None:
    """Return the file that begins a walk; None: the walk begins with the run."""
    return folder / FIRST_ISSUE if walk == "sample" else None


def layers() -> list[str]:
    """Return the rooms of the core, highest first, as import-linter holds them."""
    import tomllib

    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return list(next(contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers"))


def all_forms() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """Return the classes that carry each walk's data: those of the core, and those of the core and the plugins."""
    core = Source(path for path in sorted((ROOT / CORE).rglob("*.py")) if "testing" not in path.parts)
    api = Source(sorted((ROOT / CORE / "api").glob("*.py")))
    plugins = Source(sorted((ROOT / "plugins").glob("*/src/**/*.py")))
    found = {walk: spread(contract_forms(contracts, api), api, core) for walk, contracts in CONTRACTS.items()}
    return {walk: (own, spread(own, api, plugins)) for walk, own in found.items()}


def is_form(forms: Set[str]) -> Callable[[Any], bool]:
    """Return a test for objects of these classes, alone or among the first of a collection."""

    def carries(value: Any, depth: int = 2) -> bool:
        if type(value).__name__ in forms and type(value).__module__.startswith("relax_"):
            return True
        if depth and isinstance(value, (list, tuple, set, frozenset, dict)) and value:
            items = value.values() if isinstance(value, dict) else value
            return any(carries(item, depth - 1) for item, _ in zip(items, range(FIRST), strict=False))
        return False

    return carries


def holds(value: Any, depth: int = 8) -> bool:
    """Return True if the override's value is somewhere in this object."""
    if isinstance(value, str):
        return str(SENTINEL) in value
    if isinstance(value, float):
        return value == SENTINEL
    if depth == 0:
        return False
    return any(holds(part, depth - 1) for part in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name, None) for field in fields(value))
    elif hasattr(type(value), "model_fields"):
        yield from vars(value).values()


def walk_run(folder: Path, runner: str) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Run two steps; return the functions that a sample and a publish pass, by the forms of the core and by all forms."""
    from relax_core.control.prepare import prepare
    from relax_core.control.run import run

    forms, hook, before = all_forms(), folder / f"hook-{runner}", os.environ.get("PYTHONPATH", "")
    walked = folder / f"walked-{runner}"  # apart from the hook: authors' processes may not change folders of code
    hook.mkdir()
    walked.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK.format(root=str(ROOT), folder=str(walked)))
    (walked / "forms.json").write_text(json.dumps({walk: sorted(every) for walk, (_, every) in forms.items()}))
    prepared = prepare(["quickstart"], [*OVERRIDES, f"run.runner={runner}"], run_dir=folder / f"run-{runner}")
    issued = Follower(is_form({"Issue"}), lambda name, now: (walked / FIRST_ISSUE).touch())
    followers = {
        walk: tuple(Follower(is_form(found), begins=begins(walk, walked)) for found in both)
        for walk, both in forms.items()
    }
    os.environ["PYTHONPATH"] = os.pathsep.join([str(hook), before]) if before else str(hook)
    try:
        with profiled(issued, *(follower for both in followers.values() for follower in both)):
            run(prepared, obey=lambda _: nullcontext())
    finally:
        os.environ["PYTHONPATH"] = before
    for walk, (_, every) in followers.items():
        for file in walked.glob(f"*.{walk}"):
            for line in file.read_text(encoding="utf-8").splitlines():
                now, name = line.split(" ", 1)
                every.passed[name] = min(int(now), every.passed.get(name, int(now)))
    return {walk: (core.passed, every.passed) for walk, (core, every) in followers.items()}


def walk_override(folder: Path) -> Walk:
    """Follow an override from the command line to the plan that every role gets."""
    from relax_core.control.prepare import prepare

    follower = Follower(holds)
    with profiled(follower):
        prepare(["quickstart"], [f"optimizer.lr={SENTINEL}", "run.runner=inline"], run_dir=folder / "override")
    return Walk.of(follower.passed, CORE)


def walks() -> dict[str, Walk]:
    """Return the measured walks by name."""
    with tempfile.TemporaryDirectory() as folder:
        override = walk_override(Path(folder))
        inline, local = (walk_run(Path(folder), runner) for runner in ("inline", "local"))
    return {
        "a sample, inline, the core": Walk.of(inline["sample"][0], CORE),
        "a sample, inline, core and plugins": Walk.of(inline["sample"][1]),
        "a sample, local, both sides": Walk.of(local["sample"][1]),
        "a publish, inline, the core": Walk.of(inline["publish"][0], CORE),
        "a publish, local, both sides": Walk.of(local["publish"][1]),
        "an override": override,
    }
