# SPDX-License-Identifier: Apache-2.0
"""Follow one sample, one publish and one override through the code, and print the functions and files that each passes.

Two steps of the quickstart run on the inline runner under a profile hook. A function lies on the way of a sample when the
sample, in any of its forms (`FORMS`), is among its arguments or is what it returns; so the walk is what somebody reads
who follows it.
A name in `FORMS` that no class of the core has is an error, since the walk would silently become shorter.
Run by `tox -e walk`; `python -m tests.style.walk --list` names every function as well.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "relax_core"
FORMS = {
    "sample": {
        "Task",
        "Issue",
        "Sample",
        "Branch",
        "Rendered",
        "GenerateRequest",
        "Delta",
        "Trajectory",
        "InflightGroup",
        "ScoredSample",
        "RewardResult",
        "Score",
        "Sealed",
        "Row",
        "RowBatch",
        "Samples",
        "Claim",
        "ClaimedRows",
        "Groups",
        "Advantages",
        "Grouping",
        "LossBatch",
        "PackedBatch",
        "PolicyOutputs",
        "Loss",
        "Term",
        "Chunk",
        "ChunkPlan",
        "UpdateResult",
        "RequestBatch",
        "PendingRequest",
        "Action",
        "Observation",
        "Step",
    },
    "publish": {"Manifest", "Receipt", "TensorInfo", "WeightRegistry"},
}
"""The names of the classes in which each traveller appears on its way. `check_forms` refuses a name that no class has."""
SENTINEL = 0.00012345


class Walk:
    """The functions of the core that were passed, in the order of their first call."""

    def __init__(self, carries: Callable[[Any], bool]) -> None:
        self._carries = carries
        self.passed: dict[CodeType, None] = {}
        self._elsewhere: set[CodeType] = set()

    def event(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if code in self._elsewhere or code in self.passed or event not in ("call", "return"):
            return
        if (
            not code.co_filename.startswith(str(CORE))
            or code.co_name.startswith("<")
            or "/testing/" in code.co_filename
        ):
            self._elsewhere.add(code)
            return
        try:
            if event == "return":
                met = self._carries(value)
            else:
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                met = any(self._carries(frame.f_locals.get(name)) for name in names)
        except Exception:  # an object that cannot be looked at yet carries nothing
            return
        if met:
            self.passed[code] = None

    @property
    def functions(self) -> list[str]:
        return [f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}" for code in self.passed]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(name.split(":")[0] for name in self.functions))

    @property
    def climbs(self) -> int:
        """Count the steps of the walk that go from a lower layer back up to a higher one."""
        rooms = [name.split("/")[1] for name in self.files if name.count("/") > 1]
        order = layers()
        heights = [order.index(room) for room in rooms if room in order]
        return sum(later < sooner for sooner, later in zip(heights, heights[1:], strict=False))


@contextmanager
def profiled(*walks: Walk) -> Iterator[None]:
    """Show every call and return, of all threads that begin within, to these walks."""

    def hook(frame: FrameType, event: str, value: Any) -> None:
        if event == "call" or event == "return":
            for walk in walks:
                walk.event(frame, event, value)

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def layers() -> list[str]:
    """The rooms of the core, highest first, as import-linter holds them."""
    import tomllib

    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return list(next(contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers"))


def check_forms(forms: Mapping[str, set[str]]) -> None:
    """Raise LookupError naming every class in `forms` that the core does not define."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in CORE.rglob("*.py"))
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    if missing := sorted(set().union(*forms.values()) - classes):
        raise LookupError(f"relax_core has no class {', '.join(missing)}; correct FORMS in tests/style/walk.py")


def is_form(forms: set[str]) -> Callable[[Any], bool]:
    """A test for objects of these classes, alone or as the first of a collection."""

    def carries(value: Any, depth: int = 2) -> bool:
        if type(value).__name__ in forms:
            return True
        if depth and isinstance(value, (list, tuple, set, frozenset)) and value:
            return carries(next(iter(value)), depth - 1)
        if depth and isinstance(value, dict) and value:
            return carries(next(iter(value.values())), depth - 1)
        return False

    return carries


def holds(value: Any, depth: int = 8) -> bool:
    """Whether the override's value is somewhere in this object."""
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


def walk_run(folder: Path) -> dict[str, Walk]:
    """Run two steps and follow a sample and a publish through them."""
    from relax_core.control.prepare import prepare
    from relax_core.control.run import run

    sources = ["quickstart"]
    overrides = [
        "steps=2", "run.runner=inline", "eval.every=0", "rollout.groups_per_step=2", "max_staleness=0", "placement=colocate",
    ]  # fmt: skip
    prepared = prepare(sources, overrides, run_dir=folder / "run")
    walks = {name: Walk(is_form(forms)) for name, forms in FORMS.items()}
    with profiled(*walks.values()):
        run(prepared, signals=False)
    return walks


def walk_override(folder: Path) -> Walk:
    """Follow an override from the command line to the plan that every role gets."""
    from relax_core.control.prepare import prepare

    walk = Walk(holds)
    with profiled(walk):
        prepare(["quickstart"], [f"optimizer.lr={SENTINEL}", "run.runner=inline"], run_dir=folder / "override")
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name every function")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    check_forms(FORMS)
    with tempfile.TemporaryDirectory() as folder:
        walks = {"override": walk_override(Path(folder)), **walk_run(Path(folder))}
    if options.json:
        print(json.dumps({name: {"functions": walk.functions, "files": walk.files} for name, walk in walks.items()}))
        return
    print(f"{'walk':<10} {'functions':>9} {'files':>6} {'climbs':>7}")
    for name, walk in walks.items():
        print(f"{name:<10} {len(walk.functions):>9} {len(walk.files):>6} {walk.climbs:>7}")
        if options.list:
            print(*(f"    {function}" for function in walk.functions), sep="\n")


if __name__ == "__main__":
    main()
