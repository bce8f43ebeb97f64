"""The algorithm `{{ cookiecutter.name }}`: pure functions over a typed batch. The trainer sums and normalises the loss."""

from relax_core import learn
from relax_core.api import OLD_LOG_PROBS, Advantages, Algorithm, Column, Groups, Loss, LossBatch, Options, PolicyOutputs, Term


class {{ cookiecutter.class_name }}Options(Options):
    """Options of `{{ cookiecutter.name }}`."""

    clip: float = 0.2
    """Clip range of the ratio to the old policy: beyond 1 - clip or 1 + clip, a token gives no gradient."""


class {{ cookiecutter.class_name }}(Algorithm[{{ cookiecutter.class_name }}Options]):
    """A policy gradient with the group's mean reward as baseline and a clipped ratio."""

    min_group_size = 2  # the baseline compares the samples of a group
    denominators = frozenset({"tokens"})  # counts that divide the loss; with one, training can start before all rows arrive
    zero_advantage_skips = True  # rows with advantage 0 have no gradient, so their forward pass is skipped

    def columns(self) -> frozenset[Column]:
        """Return the columns that `loss` reads in addition to tokens, loss_mask and advantages."""
        return frozenset({OLD_LOG_PROBS})

    def advantages(self, groups: Groups) -> Advantages:
        """Return the advantage of each sample, [groups, samples]: the sample's reward minus the group's mean reward."""
        return Advantages(learn.group_mean(groups.rewards, groups.valid))

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        """Return one term, [tokens]; the trainer sums the term over all chunks and divides by the trained tokens."""
        ratio = learn.log_ratio(batch, policy.log_probs, batch.column("old_log_probs")).exp()
        return Loss({"policy": Term(learn.clipped_surrogate(ratio, batch.advantages, self.options.clip, self.options.clip))})
