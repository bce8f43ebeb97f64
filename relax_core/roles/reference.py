# SPDX-License-Identifier: Apache-2.0
"""The reference role: log-probs of rows under the weights the run started from. Stateless."""

from __future__ import annotations

from relax_core.api.role import Context, Operation, Reads, Role
from relax_core.roles.forward import Filling, OneModel
from relax_core.roles.trainer_group import TrainerGroup


class Reference(Role):
    """Log-probs under fixed weights."""

    name = "reference"

    @classmethod
    def operations(cls) -> tuple[Operation, ...]:
        consumes = frozenset({"tokens", "loss_mask"})
        return (Operation("reference.log_probs", cls.name, consumes, frozenset({"ref_log_probs"}), Reads.FIXED),)

    async def run(self, context: Context) -> None:
        trainer = await TrainerGroup.start(context, self.name)
        try:
            await OneModel(context, self.name, Filling({"ref_log_probs": "log_probs"}), trainer).run()
        finally:
            await trainer.stop()
