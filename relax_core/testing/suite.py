# SPDX-License-Identifier: Apache-2.0
"""The base of every conformance suite. A plugin's tests subclass a kind's suite and name a component:

    class TestMine(RewardSuite):
        component = "my-reward"          # or the class
        samples = ((Task("1", "2+2?", "4"), "4"),)

Suites need pytest and nothing else; a component is exercised in a process of its own first (`apart.py`), so one that blocks
or crashes fails its suite and stops nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import pytest

from relax_core.api.component import KINDS, Configurable
from relax_core.api.errors import ConfigError
from relax_core.config.run_config import keys_model
from relax_core.registry import Catalogue
from relax_core.registry.check import heavy_imports
from relax_core.registry.loader import build_options, contract_violation
from relax_core.testing.apart import Apart, run_apart


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
        if not isinstance(cls.component, str):
            return cls.component
        return _target_of(cls)  # type: ignore[arg-type]  # mypy knows no hash of a class

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

    def test_no_option_has_the_name_of_a_key_of_the_core(self) -> None:
        table = KINDS[self.kind].table
        of_core = {"name", *keys_model(table).model_fields} if table else set()
        taken = sorted(of_core & self.target().options_model().model_fields.keys())
        assert taken == [], f"rename them: [{table}] has keys of these names, which belong to the core"

    def test_discovery_imports_nothing_heavy(self) -> None:
        imports = _imports_of_listings(f"{self.target().__module__}:{self.target().__qualname__}")
        if imports is None:
            pytest.skip("no installed plugin offers it; install the project to have its listing looked at")
        assert imports == ""

    def test_the_same_input_gives_the_same_result(self, seen: Any) -> None:
        (first, again), _ = seen
        assert first == again, "the second time gave another result; take randomness from the seed that is handed in"

    def test_every_process_gives_the_same_result(self, seen: Any) -> None:
        (here, _), (elsewhere, _) = seen
        assert here == elsewhere, "another process gave another result; it depends on hash order, time or chance"


@cache
def _target_of(suite: type[Suite]) -> type[Configurable]:
    """Look a suite's component up by its name, once: reading the catalogue takes longer than most tests."""
    return Catalogue.load(suite.files).target(suite.kind, str(suite.component))


@cache
def _imports_of_listings(target: str) -> str | None:
    """Return the heavy imports of all installed plugins that offer the target; None where no plugin offers it."""
    listing = {r.module for r in Catalogue.load().records if target in (c.target for _, c in r.components)}
    return "".join(map(_heavy_imports, listing)) if listing else None


_heavy_imports = cache(heavy_imports)
"""The listings of one plugin are one module, whose import alone is looked at once."""
