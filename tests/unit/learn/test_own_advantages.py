# SPDX-License-Identifier: Apache-2.0
"""A user's function credits in an algorithm's place, and sees what is known of turns and contexts."""

from __future__ import annotations

from pathlib import Path

import pytest
from relax_plugin_policy_gradient.gpg import GPG
from relax_plugin_policy_gradient.grpo import GRPO, GRPOOptions
from relax_plugin_policy_gradient.ppo import PPO, PPOOptions
from relax_plugin_policy_gradient.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusOptions

from relax_core import learn
from relax_core.api import ConfigError
from tests.unit.learn.test_turns import of_rows

MINE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from relax_core import learn

@dataclass
class Weights:
    right: float = 1.0

def squared(groups):
    return groups.rewards ** 2

def of_contexts(groups):
    assert groups.states is not None
    return learn.of_turns(groups.contexts.double(), groups)

def a_list(groups):
    return groups.rewards.tolist()

def of_nothing(groups):
    return torch.zeros(3)

number = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def grouped() -> learn.Grouping:
    """Two samples of one group; a context is named by the state in which its turn began."""
    turns, states = [[-1, 0, 0, -1, 1], [-1, 0, 1]], [[0, 7, 7, 0, 8], [0, 7, 9]]
    made = of_rows(turns, states, [[0, 0.25, 0.25, 0, 0.5], [0, 0, 0.25]], [0, 1], [0.75, 0.25])
    assert isinstance(made, learn.Grouping)
    return made


def credit(options: GRPOOptions) -> list[float]:
    grouping = grouped()
    return list(grouping.columns(GRPO(options).advantages(grouping.groups))["advantages"].values)


def test_values_of_the_function_are_advantages_of_samples_or_tokens(mine: Path) -> None:
    squares = credit(GRPOOptions(advantages=f"{mine}:squared"))
    assert squares == pytest.approx([0, 0.5625, 0.5625, 0, 0.5625, 0, 0.0625, 0.0625])
    assert credit(GRPOOptions(advantages=f"{mine}:of_contexts")) == [0, 7, 7, 0, 8, 0, 7, 9]


def test_a_sample_without_a_verdict_gets_no_advantage(mine: Path) -> None:
    grouping = grouped()
    grouping.groups.valid[0, 1] = False
    for name in ("squared", "of_contexts"):
        said = GRPO(GRPOOptions(advantages=f"{mine}:{name}")).advantages(grouping.groups)
        values = grouping.columns(said)["advantages"].values
        assert values[:5].any() and not values[5:].any()


def test_a_reward_s_divergence_is_taken_off_before_it_sees_the_rewards(mine: Path) -> None:
    algorithm = GRPO(GRPOOptions(advantages=f"{mine}:squared", reward_kl_coef=0.1))
    assert {column.name for column in algorithm.advantage_columns()} == {
        "ref_log_probs", "rollout_log_probs", "turns", "states", "contexts", "step_rewards",
    }  # fmt: skip
    assert not GPG().advantage_columns()


def test_a_file_that_fails_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import torch\ndef f(groups:\n")
    with pytest.raises(ConfigError, match=r"algorithm\.advantages: .*can't be imported: SyntaxError"):
        GRPO(GRPOOptions(advantages=f"{tmp_path}/broken.py:f"))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere.py:squared", "there is no file .*nowhere.py"),
        ("{mine}:cubed", "no function 'cubed'"),
        ("{mine}:number", "no function 'number'"),
        ("{mine}", "as file.py:name"),
        ("no_module:squared", "No module named 'no_module'"),
    ],
)
def test_a_missing_function_is_refused_with_the_options_name(mine: Path, place: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.advantages: .*{said}"):
        GRPO(GRPOOptions(advantages=place.format(mine=mine)))


def test_a_shape_that_is_neither_is_refused(mine: Path) -> None:
    with pytest.raises(ValueError, match=r"advantages: got shape \(3,\); give \(1, 2\)"):
        credit(GRPOOptions(advantages=f"{mine}:of_nothing"))
    with pytest.raises(TypeError, match=r"algorithm\.advantages: the function gave a list; give a tensor"):
        credit(GRPOOptions(advantages=f"{mine}:a_list"))


def test_algorithms_that_are_their_way_to_credit_take_none(mine: Path) -> None:
    place = f"{mine}:squared"
    for algorithm, options in ((PPO, PPOOptions), (ReinforcePlusPlus, ReinforcePlusPlusOptions)):
        with pytest.raises(ConfigError, match="take another algorithm"):
            algorithm(options(advantages=place))
