# SPDX-License-Identifier: Apache-2.0
"""The classes that the walk follows are derived from the contracts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.style.forms import Source, contract_forms, spread
from tests.style.walk import all_forms

API = """
class Task:
    pass
class Id(NamedTuple):
    number: int
@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
Scored: TypeAlias = "float | Score"
class Score:
    pass
class Batch(Protocol):
    def rows(self): ...
class Reward:
    def score(self, task: Task, id: Id) -> Scored: ...
    def batch(self, batch: Batch) -> None: ...
"""
USE = """
@dataclass
class Group:
    tasks: Sequence[Task]
class Counted(Group):
    pass
class Branch:
    def __init__(self, group: Group, name: str) -> None: ...
class Service:
    def __init__(self, group: Group, clock: Clock) -> None: ...
class Packed:
    def rows(self): ...
@dataclass
class Result:
    values: tuple[float, ...]
def judge(task: Task) -> Result: ...
def identify(task: Task) -> Id: ...
"""


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Source, Source]:
    (tmp_path / "api.py").write_text(API)
    (tmp_path / "use.py").write_text(USE)
    return Source([tmp_path / "api.py"]), Source([tmp_path / "use.py"])


def test_forms_are_the_classes_of_the_contracts_and_those_that_carry_them(sources: tuple[Source, Source]) -> None:
    api, use = sources
    start = contract_forms(["Reward.score", "Reward.batch"], api)
    assert start == {"Task", "Score", "Batch"}
    assert spread(start, api, use) - start == {"Group", "Counted", "Branch", "Packed", "Result"}


def test_a_contract_that_does_not_exist_is_named(sources: tuple[Source, Source]) -> None:
    with pytest.raises(LookupError, match=r"no Reward\.judge; correct CONTRACTS"):
        contract_forms(["Reward.judge", "Reward.score"], sources[0])


def test_a_sample_is_followed_from_its_task_to_the_loss_and_into_plugins() -> None:
    forms = all_forms()
    core, every = forms["sample"]
    assert {"Task", "InflightGroup", "GenerateRequest", "Trajectory", "RowBatch", "PackedBatch", "Loss"} <= core
    assert {"Running"} <= every - core
    assert {"Manifest", "Receipt"} <= forms["publish"][0]
    assert not {"Version", "RowId", "Plan", "Context", "EnginePool"} & every
