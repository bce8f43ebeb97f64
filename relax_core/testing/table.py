# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of plugins' configuration tables: defaults, documented keys, and `problems` without side effects."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

from relax_core.api.errors import ConfigError
from relax_core.registry.loader import build_options
from relax_core.testing.suite import Suite


class TableSuite(Suite):
    """The suite of a table; a subclass sets `component`, and `options` to keys that the table accepts."""

    kind = "table"
    config: ClassVar[Mapping[str, Any]] = {
        "model": {"path": "models/tiny"},
        "data": {"train": "train.jsonl"},
        "steps": 4,
    }
    """Configuration that `problems` is given; the conformance tests expect no problem in it."""

    @classmethod
    def make(cls) -> Any:
        return build_options(cls.target().options_model(), cls.options, cls.kind)

    @classmethod
    def exercise(cls, component: Any) -> Any:
        return [str(problem) for problem in component.problems(cls.config)]

    def test_a_configuration_may_omit_the_table(self) -> None:
        model = self.target().options_model()
        assert build_options(model, {}, self.kind) == model()

    def test_every_key_is_documented(self) -> None:
        bare = [name for name, field in self.target().options_model().model_fields.items() if not field.description]
        assert bare == [], "write a string under each of these fields"

    def test_problems_are_errors_of_the_configuration_and_change_nothing(self, made: Any) -> None:
        config = copy.deepcopy(dict(self.config))
        found = list(made.problems(config))
        assert all(isinstance(problem, ConfigError) for problem in found), "problems() must yield ConfigErrors"
        assert config == self.config, "problems() changed the configuration"
