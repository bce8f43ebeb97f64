"""The algorithm `{{ cookiecutter.name }}`: PPO's clipped surrogate with advantages of its own.

To change the surrogate instead, derive from `learn.PolicyGradient` and define `surrogate`. For a loss of another shape,
derive from `relax_core.api.Algorithm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_core import learn
from relax_core.api import Groups

if TYPE_CHECKING:
    from torch import Tensor


class {{ cookiecutter.class_name }}(learn.ClippedPolicyGradient[learn.ClippedOptions]):
    """A policy gradient with the group's mean reward as baseline and a clipped ratio."""

    def credit(self, groups: Groups) -> Tensor:
        """Return the advantage of each sample, [groups, samples]: the sample's reward minus the group's mean reward."""
        return learn.group_mean(groups.rewards, groups.valid)
