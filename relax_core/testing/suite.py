# SPDX-License-Identifier: Apache-2.0
"""The base of all conformance suites.

A plugin's tests subclass the suite of a kind and name a component:

    class TestMine(RewardSuite):
        component = "my-reward"          # or the class
        samples = ((Task("1", "2+2?", "4"), "4"),)

Suites need only pytest. A component is exercised in a separate process first (`apart.py`), so a component that blocks
or crashes fails its suite without stopping the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, cast

import pytest

from relax_core.api.component import KINDS, Configurable
from relax_core.api.errors import ConfigError
from relax_core.config.run_config import keys_model
from relax_core.registry import Catalogue
from relax_core.registry.description import heavy_imports
from relax_core.registry.loader import build_options, contract_violation
from relax_core.testing.apart import Apart, run_apart


class Suite:
    """The base of all conformance suites, with the checks that apply to components of every kind."""

    kind: ClassVar[str] = ""
    component: ClassVar[Any] = ""
    """The component's name, as in a configuration, or its class; a check's function."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the tested instances."""
    files: ClassVar[tuple[str, ...]] = ()
    """Paths of single-file plugins that define the component."""
    deadline_s: ClassVar[float] = 30.0
    """Seconds within which the exercise must end, after the imports."""
    slow_modules: ClassVar[tuple[str, ...]] = ("numpy",)
    """Modules of the exercise that are slow to import. A fork server imports those that the tests have imported."""
    generic: ClassVar[bool] = False
    """True in `relax plugins check`, which lacks the author's samples: tests that need them are skipped."""

    @classmethod
    def target(cls) -> type[Configurable]:
        """Return the component's class."""
        if not isinstance(cls.component, str):
            return cast(type[Configurable], cls.component)
        return _target_of(cls)  # type: ignore[arg-type]  # mypy does not know that classes are hashable

    @classmethod
    def make(cls) -> Any:
        """Make a new instance with the suite's options."""
        target = cls.target()
        return target(build_options(target.options_model(), cls.options, f"{cls.kind}.{target.__name__}"))

    @classmethod
    def prepare(cls) -> None:
        """Import modules that the exercise needs, before its deadline begins."""

    @classmethod
    def exercise(cls, component: Any) -> Any:
        """Use the component once in all ways of its kind; return plain data that must be the same on each call."""
        return None

    @classmethod
    def exercised(cls) -> tuple[Any, ...]:
        """Return the results of two processes with different hash seeds."""
        values = []
        for hash_seed in (1, 2):
            apart = run_apart(cls, hash_seed, cls.deadline_s)
            cls.judge(apart)
            values.append(apart.value)
        return tuple(values)

    @pytest.fixture(scope="class")
    @classmethod
    def seen(cls) -> Any:
        """Return the results of `exercised`."""
        return cls.exercised()

    @classmethod
    def judge(cls, apart: Apart) -> None:
        """Fail for a blocked or failed exercise. Skip a generic suite that raised: its samples may be unfit."""
        if apart.blocked:
            pytest.fail(f"the component did not return within {cls.deadline_s:g} s; it blocks for ever", pytrace=False)
        if apart.error and cls.generic and apart.raised:
            pytest.skip(f"needs its own samples; subclass {cls.__mro__[1].__name__} in its tests ({apart.error})")
        if apart.error:
            pytest.fail(apart.error, pytrace=False)

    @pytest.fixture
    def made(self, seen: Any) -> Any:
        """Make an instance in this process, after the exercise has shown that the component does not block."""
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

    def test_no_option_has_the_name_of_a_key_of_the_core(self) -> None:
        table = KINDS[self.kind].table
        of_core = {"name", *keys_model(table).model_fields} if table else set()
        taken = sorted(of_core & self.target().options_model().model_fields.keys())
        assert taken == [], f"rename these options: [{table}] already has keys of the core with these names"

    def test_discovery_imports_nothing_heavy(self) -> None:
        imports = _imports_of_listings(f"{self.target().__module__}:{self.target().__qualname__}")
        if imports is None:
            pytest.skip("no installed plugin provides the component; install its project to check the imports")
        assert imports == ""

    def test_the_same_input_gives_the_same_result(self, seen: Any) -> None:
        (first, again), _ = seen
        assert first == again, "the second call gave another result; draw randomness only from the seed argument"

    def test_every_process_gives_the_same_result(self, seen: Any) -> None:
        (here, _), (elsewhere, _) = seen
        assert here == elsewhere, "another process gave another result; it depends on hash order, time or randomness"


@cache
def _target_of(suite: type[Suite]) -> type[Configurable]:
    """Find a suite's component by its name; cached because reading the catalogue takes longer than most tests."""
    return Catalogue.load(suite.files).target(suite.kind, str(suite.component))


@cache
def _imports_of_listings(target: str) -> str | None:
    """Return the heavy imports of the installed plugins that provide the target; None if no plugin provides it."""
    listing = {r.module for r in Catalogue.load().records if target in (c.target for _, c in r.components)}
    return "".join(map(_heavy_imports, listing)) if listing else None


_heavy_imports = cache(heavy_imports)
"""Heavy imports of a plugin's listing module, computed once per module."""
