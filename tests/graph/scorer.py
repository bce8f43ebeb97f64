# SPDX-License-Identifier: Apache-2.0
"""A stranger's plugin: a role that owns a model and fills a column with its log-probs, and an algorithm that reads them."""

from relax_core import learn
from relax_core.api import Advantages, Algorithm, Column, Context, Loss, Operation, Reads, Role, Term
from relax_core.roles import ForwardColumns, ForwardLoop, RankGroup

SCORER_LOG_PROBS = Column("scorer_log_probs", "float32")


class Scorer(Role):
    """Scores rows with a second model."""

    name = "scorer"

    @classmethod
    def operations(cls):
        consumes, produces = frozenset({"tokens", "loss_mask"}), frozenset({SCORER_LOG_PROBS.name})
        return (Operation("scorer.log_probs", cls.name, consumes, produces, Reads.FIXED),)

    async def run(self, context: Context) -> None:
        async with await RankGroup.start(context, self.name) as ranks:
            await ForwardLoop(context, self.name, ForwardColumns({SCORER_LOG_PROBS.name: "log_probs"}), ranks).run()


class Anchored(Algorithm):
    """REINFORCE that is told how far the policy is from the scorer."""

    def columns(self):
        return frozenset({SCORER_LOG_PROBS})

    def advantages(self, groups):
        return Advantages(learn.group_mean(groups.rewards, groups.valid))

    def loss(self, batch, policy):
        mask = batch.loss_mask
        away = (policy.log_probs.detach() - batch.column(SCORER_LOG_PROBS.name)).abs() * mask
        return Loss({"policy": Term(-policy.log_probs * batch.advantages)}, {"scorer/away": (away.sum(), mask.sum())})
