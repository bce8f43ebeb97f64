# SPDX-License-Identifier: Apache-2.0
"""What a forward gave, by name: the trainers' `PolicyOutputs`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Outputs:
    """Differentiable outputs of one packed chunk, [tokens] each unless the output says otherwise."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = dict(values)

    @property
    def log_probs(self) -> Tensor:
        return self.output("log_probs")

    def output(self, name: str) -> Tensor:
        if name not in self._values:
            raise KeyError(
                f"output {name!r} was not computed; name it in Algorithm.outputs() (have: {list(self._values)})"
            )
        return self._values[name]
