# SPDX-License-Identifier: Apache-2.0
"""torch.compile of a model's blocks, each its own graph, for rows of any number and length. What fails says so at start.

It pays where a run is long and elementwise work a large share of a step: small models, short rows. It costs a compiler
and a minute or more before the first step, on a CPU often several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from relax_core.api import ConfigError
from relax_plugin_torch.blocks import known_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIELD = "trainer.compile"


def compile_blocks(model: PreTrainedModel, attempt: Callable[[], Tensor], backend: str = "inductor") -> None:
    """Compile, and try a forward and backward pass, which `attempt` gives the result of. Raises ConfigError."""
    for block in known_blocks(model, FIELD):
        block.compile(backend=backend, dynamic=True)
    try:
        result = attempt()
        if result.requires_grad:
            result.backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # compilers fail in their own ways
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(FIELD, "true", f"torch.compile fails here ({why}); leave it out") from error
    finally:
        for parameter in model.parameters():
            parameter.grad = None
