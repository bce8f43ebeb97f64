# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of roles. It checks the operations that the class declares, and does not run the role."""

from __future__ import annotations

import inspect
from typing import Any

from relax_core.api.plan import Operation
from relax_core.testing.suite import Suite


class RoleSuite(Suite):
    """The suite of a role; a subclass sets `component`."""

    kind = "role"

    @classmethod
    def exercise(cls, component: Any) -> Any:
        return [[o.name, sorted(o.consumes), sorted(o.produces), str(o.reads)] for o in type(component).operations()]

    def test_operations_are_its_own(self, made: Any) -> None:
        operations, name = type(made).operations(), made.name.replace("-", "_")
        assert operations and all(isinstance(operation, Operation) for operation in operations)
        for operation in operations:
            assert operation.role.replace("-", "_") == name, (
                f"operation {operation.name} names the role {operation.role!r}; it must name its own"
            )
            assert operation.name.partition(".")[0] == name, f"rename the operation {operation.name} to `{name}.verb`"

    def test_operations_of_one_role_have_different_names(self, made: Any) -> None:
        names = [operation.name for operation in type(made).operations()]
        assert len(set(names)) == len(names)

    def test_a_role_runs_as_a_coroutine(self, made: Any) -> None:
        assert inspect.iscoroutinefunction(made.run), "define `run` with `async def run(self, context)`"
