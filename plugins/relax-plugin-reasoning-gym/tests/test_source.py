# SPDX-License-Identifier: Apache-2.0
"""Tasks by file and number: the same ones always, none of a held-out file, and refusals that say what to change."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from relax_plugin_reasoning_gym.barred import BARRED
from relax_plugin_reasoning_gym.recipe import Recipe
from relax_plugin_reasoning_gym.source import INSTRUCTION, ReasoningGymOptions, ReasoningGymSource
from relax_plugin_reasoning_gym.tasks_file import SetTable, shares

from relax_core.api import ConfigError, Message

README = Path(__file__).parent.parent / "README.md"
MIXED = """
size = 80
seed = {seed}
exclude = {exclude}
[[sets]]
name = "chain_sum"
weight = 3
level = 0
options = {{ max_terms = 3 }}
[[sets]]
name = "tower_of_hanoi"
"""


def opened(path: Path, text: str, **options: object) -> ReasoningGymSource:
    path.write_text(text)
    source = ReasoningGymSource(ReasoningGymOptions(**options))  # type: ignore[arg-type]
    source.open(str(path), {})
    return source


def test_every_stretch_mixes_the_sets_by_weight(tmp_path: Path) -> None:
    source = opened(tmp_path / "train.gym", MIXED.format(seed=1, exclude=[]))
    sets = [source[index].column("set") for index in range(len(source))]
    assert Counter(sets) == {"chain_sum": 60, "tower_of_hanoi": 20}
    for start in range(0, 80, 4):
        assert sets[start : start + 4].count("tower_of_hanoi") == 1


def test_a_task_is_a_question_with_the_instruction_and_the_recipe_of_its_entry(tmp_path: Path) -> None:
    source = opened(tmp_path / "train.gym", MIXED.format(seed=1, exclude=[]))
    tasks = [source[index] for index in range(len(source))]
    assert all(isinstance(task.prompt, tuple) and task.prompt[0].text.endswith(f"\n\n{INSTRUCTION}") for task in tasks)
    assert {task.column("level") for task in tasks} == {None, 0}
    columns = [dict(task.metadata) for task in tasks]
    assert json.loads(json.dumps(columns)) == columns
    assert [Recipe.of(task.column("recipe")).set for task in tasks] == [task.column("set") for task in tasks]
    bare = opened(tmp_path / "train.gym", MIXED.format(seed=1, exclude=[]), instruction="", chat=False)
    assert tasks[0].prompt == (Message("user", f"{bare[0].prompt}\n\n{INSTRUCTION}"),)


def test_other_seeds_share_no_random_numbers_and_excluded_questions_are_not_asked(tmp_path: Path) -> None:
    held = opened(tmp_path / "held-out.gym", MIXED.format(seed=2, exclude=[]))
    kept_out = {held[index].prompt for index in range(len(held))}
    careless = opened(tmp_path / "careless.gym", MIXED.format(seed=1, exclude=[]))
    assert kept_out & {careless[index].prompt for index in range(len(careless))}, "the example shows nothing"
    source = opened(tmp_path / "train.gym", MIXED.format(seed=1, exclude='["held-out.gym"]'))
    tasks = [source[index] for index in range(len(source))]
    assert not kept_out & {task.prompt for task in tasks}
    both = [*tasks, *(held[index] for index in range(len(held)))]
    numbers = [recipe.seed + recipe.index for recipe in (Recipe.of(task.column("recipe")) for task in both)]
    assert len(set(numbers)) == len(numbers)


def test_a_set_with_no_question_left_is_named(tmp_path: Path) -> None:
    few = '[[sets]]\nname = "tower_of_hanoi"\noptions = { min_disks = 3, max_disks = 3, min_pegs = 3, max_pegs = 3 }'
    opened(tmp_path / "held-out.gym", f"size = 300\nseed = 1\n{few}")
    source = opened(tmp_path / "train.gym", f'seed = 2\nexclude = ["held-out.gym"]\n{few}')
    with pytest.raises(
        ConfigError, match=r"train\.gym task 0 \(tower_of_hanoi\): every question drawn is in an excluded"
    ):
        source[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("size = 1", "sets: Field required"),
        ("sets = []", "sets: "),
        ('[[sets]]\nname = "chain_sums"', r"sets\.0\.name: 'chain_sums', which reasoning-gym does not have"),
        (
            '[[sets]]\nname = "gcd"\n[[sets]]\nname = "coin_flip"',
            r"sets\.1\.name: 'coin_flip', which is barred: a prefix",
        ),
        ('[[sets]]\nname = "gcd"\nweigth = 1', "weigth: Extra inputs"),
        ('[[sets]]\nname = "gcd"\noptions = { min_terms = 2 }', "no option 'min_terms'; its options: max_numbers"),
        ('[[sets]]\nname = "gcd"\noptions = { seed = 2 }', "no option 'seed'"),
        (
            '[[sets]]\nname = "gcd"\noptions = { min_numbers = 1 }',
            "refuses its options: min_numbers must be at least 2",
        ),
        ('[[sets]]\nname = "gcd"\noptions = { min_numbers = 1979-05-27 }', "write dates and times as text"),
        ('[[sets]]\nname = "gcd"\nlevel = 99', "at level 99 refuses its options: the set has only levels 0 to"),
        ('[[sets]]\nname = "acre"\nlevel = 0', "the set has no curriculum"),
        ('size = 1\n[[sets]]\nname = "gcd"\n[[sets]]\nname = "lcm"', r"sets\.1\.name: 'lcm' gets 0 of 1 tasks"),
        ('seed = 4096\n[[sets]]\nname = "gcd"', "seed: Input should be less than 4096"),
        ('exclude = ["none.gym"]\n[[sets]]\nname = "gcd"', r"none\.gym: No such file"),
        ('exclude = ["own.gym"]\n[[sets]]\nname = "gcd"', r"own\.gym, which excludes files itself"),
        ("[[sets]", "write it as TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name_and_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        opened(tmp_path / "own.gym", text)
    assert ".gym" in str(refused.value)


def test_a_barred_set_can_be_allowed_and_columns_cannot_be_renamed(tmp_path: Path) -> None:
    source = opened(tmp_path / "own.gym", 'size = 2\n[[sets]]\nname = "coin_flip"', allow_barred=True)
    assert source[1].column("set") == "coin_flip"
    with pytest.raises(ConfigError, match="the tasks are made"):
        source.open(str(tmp_path / "own.gym"), {"prompt": "question"})


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(1, 1000))
def test_shares_are_within_one_of_their_weights_and_sum_to_the_size(weights: list[float], size: int) -> None:
    counts = shares(tuple(SetTable(name="gcd", weight=weight) for weight in weights), size)
    assert sum(counts) == size
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - size * weight / sum(weights)) < 1 + 1e-9


def test_the_files_of_the_readme_can_be_opened(tmp_path: Path) -> None:
    train, held_out, *_ = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "held-out.gym").write_text(held_out)
    source = opened(tmp_path / "train.gym", train)
    assert len(source) == 10_000
    assert source[9_999].answer


def test_the_readme_names_every_barred_set() -> None:
    _, section = README.read_text().split("## Barred sets")
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == set(BARRED)
