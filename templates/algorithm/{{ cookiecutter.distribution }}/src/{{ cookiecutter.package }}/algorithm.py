"""The algorithm `{{ cookiecutter.name }}`: what is learnt from a sample. Pure functions over a typed batch; it reduces nothing itself."""

from relax_core import learn
from relax_core.api import OLD_LOG_PROBS, Advantages, Algorithm, Column, Groups, Loss, LossBatch, Options, PolicyOutputs, Term


class {{ cookiecutter.class_name }}Options(Options):
    clip: float = 0.2
    """How far the ratio to the old policy may move before it gives no gradient."""


class {{ cookiecutter.class_name }}(Algorithm[{{ cookiecutter.class_name }}Options]):
    """Policy gradient with the group's mean reward as baseline and a clipped ratio."""

    min_group_size = 2  # a sample is compared with the others of its task
    denominators = frozenset({"tokens"})  # all that `loss` divides by: with one count alone, training may begin before a step's last rows
    zero_advantage_skips = True  # rows without advantage have no gradient here, so their forward is left out

    def columns(self) -> frozenset[Column]:
        """What `loss` reads beside tokens, loss_mask and advantages."""
        return frozenset({OLD_LOG_PROBS})

    def advantages(self, groups: Groups) -> Advantages:
        """[groups, samples]: what each sample is worth beside the others of its group."""
        return Advantages(learn.group_mean(groups.rewards, groups.valid))

    def loss(self, batch: LossBatch, policy: PolicyOutputs) -> Loss:
        """One term of [tokens]; the trainer sums it over all chunks and divides by the tokens of the whole update."""
        ratio = learn.log_ratio(batch, policy.log_probs, batch.column("old_log_probs")).exp()
        return Loss({"policy": Term(learn.clipped_surrogate(ratio, batch.advantages, self.options.clip, self.options.clip))})
