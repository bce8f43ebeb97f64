# SPDX-License-Identifier: Apache-2.0
"""The suites of sources, samplers, filters, families, roles and policies: the core's own pass, mutants fail."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from relax_plugin_chat.chat import ChatFamily
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from relax_core.api import Filter, Proposal, Role, Sampler, ScalingPolicy
from relax_core.api.plan import Operation
from relax_core.data.task_files import Files, JsonLines, TableSource
from relax_core.sampling.groups import Shuffle
from relax_core.testing.filter import FilterSuite
from relax_core.testing.model_family import ModelFamilySuite
from relax_core.testing.role import RoleSuite
from relax_core.testing.sampler import SamplerSuite
from relax_core.testing.scaling_policy import ScalingPolicySuite
from relax_core.testing.suite import Suite
from relax_core.testing.task_source import TaskSourceSuite

pytestmark = [pytest.mark.process, pytest.mark.one_process("exercises")]  # one worker: its suites share fork servers
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


class TestShuffle(SamplerSuite):
    component = Shuffle


class TestJsonLines(TaskSourceSuite):
    component = JsonLines


class TestFiles(TaskSourceSuite):
    component = Files


class TestTable(TaskSourceSuite):
    component = TableSource

    @classmethod
    def store(cls, rows: Any, directory: Path) -> str:
        parquet.write_table(pa.Table.from_pylist(list(rows)), directory / "tasks.parquet", row_group_size=2)
        return str(directory / "tasks.parquet")


class TestChat(ModelFamilySuite):
    component = ChatFamily

    @classmethod
    def open(cls, component: Any) -> Any:
        """A tokenizer of bytes and a template of the common shape."""
        with tempfile.TemporaryDirectory() as directory:
            component.open({"path": _model(Path(directory))})
        return component


class EqualRewards(Filter):
    def reject(self, task, attempts, trajectories, rewards):
        return "equal" if max(rewards) == min(rewards) else ""


class TestEqualRewards(FilterSuite):
    component = EqualRewards
    test_discovery_imports_nothing_heavy = None  # nobody offers it: it is made here


class Busy(ScalingPolicy):
    def decide(self, state, signals, now):
        full = signals.size is not None and signals.use is not None and signals.use > 0.9
        return None, Proposal(signals.size + 1, f"{signals.use:.0%} in use") if full else None


class TestBusy(ScalingPolicySuite):
    component = Busy
    test_discovery_imports_nothing_heavy = None  # nobody offers it: it is made here


class Watcher(Role):
    name = "watcher"

    @classmethod
    def operations(cls):
        return (Operation("watcher.look", cls.name, frozenset({"rewards"}), frozenset()),)

    async def run(self, context):
        return None


class TestWatcher(RoleSuite):
    component = Watcher
    test_discovery_imports_nothing_heavy = None  # nobody offers it: it is made here


class Forgetful(Shuffle):
    def pick(self, group, num_tasks, seed):
        self.count = getattr(self, "count", -1) + 1
        return self.count % num_tasks


class Beyond(Sampler):
    def pick(self, group, num_tasks, seed):
        return num_tasks


class Mute(EqualRewards):
    def reject(self, task, attempts, trajectories, rewards):
        return None


class Short(JsonLines):
    def __len__(self):
        return super().__len__() - 1


class Shy(JsonLines):
    def open(self, path, columns):
        if Path(path).exists():
            super().open(path, columns)


class Again(ChatFamily):
    def delta(self, before, appended, last_token=None):
        return self.start((*before, *appended))


class Blind(ScalingPolicy):
    def decide(self, state, signals, now):
        return None, Proposal(8, "eight are always enough")


class Restless(ScalingPolicy):
    def decide(self, state, signals, now):
        return None, Proposal(5 if (signals.size or 0) < 5 else 1, "more") if signals.size else None


class Remembering(Busy):
    def decide(self, state, signals, now):
        self.calls = getattr(self, "calls", 0) + 1
        return self.calls, None


class Nothing(Busy):
    def decide(self, state, signals, now):
        return None, Proposal(0, "no engine is needed")


class Stranger(Watcher):
    @classmethod
    def operations(cls):
        return (Operation("actor.fit", "actor", frozenset(), frozenset()),)


@pytest.mark.parametrize(
    ("suite", "mutant", "name"),
    [
        (TestShuffle, Forgetful, "continues_from_its_state"),
        (TestShuffle, Beyond, "every_pick_is_a_task"),
        (TestEqualRewards, Mute, "a_reason_is_text"),
        (TestJsonLines, Short, "every_row_is_a_task"),
        (TestJsonLines, Shy, "missing_file"),
        (TestChat, Again, "nothing_before_it"),
        (TestBusy, Nothing, "a_number_of_engines"),
        (TestBusy, Remembering, "only_on_the_arguments"),
        (TestBusy, Blind, "data_that_are_missing"),
        (TestBusy, Restless, "oscillate"),
        (TestWatcher, Stranger, "its_own"),
    ],
)
def test_a_mutant_fails(suite, mutant, name, tmp_path):
    failed = list(_failing(type("Mutant", (suite,), {"component": mutant})(), tmp_path))
    assert any(name in one for one in failed), failed


def _failing(suite: Suite, directory: Path) -> Iterator[str]:
    """Tests that need no other process and fail."""
    for name in (name for name in dir(suite) if name.startswith("test_") and callable(getattr(suite, name))):
        needs = inspect.signature(getattr(suite, name)).parameters
        if "seen" in needs:
            continue
        try:
            getattr(suite, name)(**{need: _given(suite, need, directory) for need in needs})
        except pytest.skip.Exception:
            continue
        except (Exception, pytest.fail.Exception) as error:
            yield f"{name}: {error}"


def _given(suite: Any, need: str, directory: Path) -> Any:
    made = suite.make()
    if need == "opened":
        made.open(suite.store(_rows(), directory), {})
    if need == "family":
        suite.open(made)
    return directory if need == "tmp_path" else made


def _rows() -> Any:
    from relax_core.testing.task_source import ROWS

    return ROWS


def _model(directory: Path) -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": len(alphabet) + 2}))
    return str(directory)
