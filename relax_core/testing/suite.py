# SPDX-License-Identifier: Apache-2.0
"""The base of every conformance suite. A plugin's tests subclass a kind's suite and name a component:

    class TestMine(RewardSuite):
        component = "my-reward"          # or the class
        samples = ((Task("1", "2+2?", "4"), "4"),)

Suites need pytest and nothing else; a component is exercised in a process of its own first, so one that blocks or
crashes fails its suite and stops nothing. A suite travels to that process by cloudpickle over a pipe; classes of
modules that the process could not import go by value.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import cloudpickle
import pytest

from relax_core.api.component import KINDS, Configurable
from relax_core.api.errors import ConfigError
from relax_core.registry import Catalogue
from relax_core.registry.check import heavy_imports
from relax_core.registry.handshake import find_module
from relax_core.registry.loader import build_options, contract_violation

START_S = 180.0
"""For imports, before the exercise's own deadline begins: heavy libraries load slowly on a busy machine."""
READY = b"\x00ready\n"


class Suite:
    """The base of all conformance suites: checks that hold for every component, whatever its kind."""

    kind: ClassVar[str] = ""
    component: ClassVar[str | type] = ""
    """Its name, as users write it, or its class."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options to test it with."""
    files: ClassVar[tuple[str, ...]] = ()
    """Single-file plugins that the name comes from."""
    deadline_s: ClassVar[float] = 30.0
    """Once imported, its exercise must end within this."""
    generic: ClassVar[bool] = False
    """Set by `relax plugins check`, which has no samples of the author's: what only they can show is skipped."""

    @classmethod
    def target(cls) -> type[Configurable]:
        """The component's class."""
        if isinstance(cls.component, str):
            return Catalogue.load(cls.files).target(cls.kind, cls.component)
        return cls.component

    @classmethod
    def make(cls) -> Any:
        """A new instance with the suite's options."""
        target = cls.target()
        return target(build_options(target.options_model(), cls.options, f"{cls.kind}.{target.__name__}"))

    @classmethod
    def prepare(cls) -> None:
        """Import what the exercise will: its deadline begins afterwards."""

    @classmethod
    def exercise(cls, component: Any) -> Any:
        """Use the component once in all ways that its kind has; returns plain data that must not differ."""
        return None

    @pytest.fixture(scope="class")
    @classmethod
    def seen(cls) -> Any:
        """Return what two processes saw, the second with another hash seed."""
        values = []
        for hash_seed in (1, 2):
            apart = run_apart(cls, hash_seed, cls.deadline_s)
            cls.judge(apart)
            values.append(apart.value)
        return tuple(values)

    @classmethod
    def judge(cls, apart: Apart) -> None:
        """Fail, or skip where only the author's own samples could tell."""
        if apart.blocked:
            pytest.fail(f"did not return within {cls.deadline_s:g} s; it blocks for ever", pytrace=False)
        if apart.error and cls.generic and apart.raised:
            pytest.skip(f"needs samples of its own; subclass {cls.__mro__[1].__name__} in its tests ({apart.error})")
        if apart.error:
            pytest.fail(apart.error, pytrace=False)

    @pytest.fixture
    def made(self, seen: Any) -> Any:
        """An instance in this process, once it is known that it does not block."""
        return self.make()

    def test_is_of_its_kind(self) -> None:
        assert contract_violation(KINDS[self.kind], self.target()) == ""

    def test_options_round_trip(self) -> None:
        model = self.target().options_model()
        options = build_options(model, self.options, self.kind)
        assert model.model_validate(options.model_dump()) == options
        assert model.model_validate_json(options.model_dump_json()) == options

    def test_an_unknown_option_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="not_an_option"):
            build_options(self.target().options_model(), {**self.options, "not_an_option": 1}, self.kind)

    def test_discovery_imports_nothing_heavy(self) -> None:
        target = f"{self.target().__module__}:{self.target().__qualname__}"
        listing = {r.module for r in Catalogue.load().records if target in (c.target for _, c in r.components)}
        if not listing:
            pytest.skip("no installed plugin offers it; install the project to have its listing looked at")
        assert "".join(map(heavy_imports, listing)) == ""

    def test_the_same_input_gives_the_same_result(self, seen: Any) -> None:
        (first, again), _ = seen
        assert first == again, "the second time gave another result; take randomness from the seed that is handed in"

    def test_every_process_gives_the_same_result(self, seen: Any) -> None:
        (here, _), (elsewhere, _) = seen
        assert here == elsewhere, "another process gave another result; it depends on hash order, time or chance"


@dataclass(frozen=True, slots=True)
class Apart:
    """An end: a value, or an error."""

    value: Any = None
    error: str = ""
    raised: bool = False
    """The component raised: its samples may not suit it."""
    blocked: bool = False


def run_apart(suite: type[Suite], hash_seed: int, deadline_s: float) -> Apart:
    """`suite.exercise` on a new instance, in another process with this hash seed."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path}
    child = subprocess.Popen(
        [sys.executable, "-m", "relax_core.testing.child"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, start_new_session=True,
    )  # fmt: skip
    try:
        return _converse(child, _packed(suite), deadline_s)
    finally:
        _end(child)


def _converse(child: subprocess.Popen[bytes], payload: bytes, deadline_s: float) -> Apart:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(payload)
    child.stdin.close()
    child.stdin = None
    started = _read_until_ready(child.stdout.fileno(), time.monotonic() + START_S)
    if started is None:
        return Apart(error=f"its import did not end within {START_S:g} s", blocked=True)
    try:
        answer, noise = child.communicate(timeout=deadline_s if started else None)
    except subprocess.TimeoutExpired:
        return Apart(blocked=True)
    if not answer:
        last = noise.decode(errors="replace").strip()[-1500:]
        return Apart(error=f"its process ended with exit code {child.returncode}\n{last}")
    value, error, raised = pickle.loads(answer)
    return Apart(value, error, raised)


def _read_until_ready(pipe: int, deadline: float) -> bool | None:
    """True once imported, False where the child ended first, None where it takes too long."""
    got = b""
    while got != READY:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        piece = os.read(pipe, len(READY) - len(got))
        if not piece:
            return False
        got += piece
    return True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill it with all that it started."""
    with suppress(ProcessLookupError):  # it has ended already, and left nothing
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _packed(suite: type[Suite]) -> bytes:
    owners = {suite.__module__}
    if isinstance(suite.component, type):
        owners |= {cls.__module__ for cls in suite.component.__mro__}
    with _by_value([module for name in owners if (module := sys.modules.get(name))]):
        return bytes(cloudpickle.dumps(suite))


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    """Pickle what these modules define by value where a fresh interpreter would not find them."""
    strangers = [module for module in modules if not _importable(module)]
    for module in strangers:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in strangers:
            cloudpickle.unregister_pickle_by_value(module)


def _importable(module: ModuleType) -> bool:
    spec = None if module.__name__ == "__main__" else find_module(module.__name__)
    return spec is not None and spec.origin == getattr(module, "__file__", spec.origin)
