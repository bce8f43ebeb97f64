# SPDX-License-Identifier: Apache-2.0
"""The conformance suite of sinks: writing a whole run, unchanged arguments, closing at any time, resuming and rollbacks.

A suite that overrides `read_back` also checks the values that the sink has stored.
"""

from __future__ import annotations

import copy
import tempfile
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from relax_core.api.events import UNDONE, Sink, Span
from relax_core.testing.suite import Suite

CONFIG: Mapping[str, Any] = {"steps": 4, "model": {"path": "models/tiny"}}
SAMPLES: tuple[Mapping[str, Any], ...] = (
    {
        "task_id": "t-1",
        "prompt": "What is <b>2 + 2</b>?",
        "response": "4\n",
        "reward": 1.0,
        "outcome": "finished",
    },
    {
        "task_id": "t-2",
        "prompt": [{"role": "user", "content": [{"type": "image", "key": "k"}, {"type": "text", "text": "π?"}]}],
        "messages": [
            {"role": "user", "content": [{"type": "image", "key": "k"}, {"type": "text", "text": "π?"}]},
            {"role": "assistant", "content": "3"},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "3.1"},
        ],
        "response": "3.1",
        "reward": 0.5,
        "outcome": "finished",
    },
    {"task_id": "t-3", "prompt": "", "response": None, "reward": None, "outcome": "reward_timeout"},
)
SPANS = (
    Span("steps", "work", "step 1", 1_700_000_000.0, 1_700_000_004.0),
    Span("actor", "wait", "rows", 1_700_000_000.0, 1_700_000_001.5, "rollout"),
    Span("actor/rank-0", "work", "forward", 1_700_000_001.5, 1_700_000_004.0, "", ("cpu:0",)),
)
Shown = Mapping[str, Mapping[int, float]]
MEDIA: Mapping[str, bytes] = {
    "k.image": b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAQAAAADCAIAAAA7ljmRAAAAEElEQVR42mP8z4AATAy4OAAmdgEFDPIXWgAAAABJRU5ErkJggg=="
    ),
    "s.audio": b"RIFF....WAVE....",
    "v.video": b"\x1a\x45\xdf\xa3....",
}
"""Files of previews by key and kind: an image, and the beginnings of a sound and of a video."""


def with_media(run_dir: Path) -> dict[str, Any]:
    """Write the previews of MEDIA to a run directory, and return a sample that shows them."""
    folder = run_dir / "media" / "previews"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in MEDIA.items():
        (folder / name).write_bytes(data)
    parts = [{"type": name.partition(".")[2], "key": name[0]} for name in MEDIA]
    return {
        "task_id": "t-4", "prompt": [{"role": "user", "content": parts}], "response": "x", "reward": 1.0,
        "outcome": "finished",
    }  # fmt: skip


class SinkSuite(Suite):
    """The suite of a sink; a subclass sets `component`, and `options` if the defaults need a service."""

    kind: ClassVar[str] = "sink"

    @classmethod
    def read_back(cls, run_dir: Path) -> Shown | None:
        """Return the values that the sink stored, by metric key and step; None skips the checks of stored values."""
        return None

    @classmethod
    def exercise(cls, component: Any) -> Any:
        with tempfile.TemporaryDirectory() as run_dir:
            _write(component, run_dir, range(1, 3))
            return cls.read_back(Path(run_dir))

    def test_takes_a_whole_run(self, made: Any, tmp_path: Path) -> None:
        _write(made, str(tmp_path), range(1, 3))
        self._expect(tmp_path, range(1, 3))

    def test_takes_keys_it_never_saw_and_numbers_that_are_not_finite(self, made: Any, tmp_path: Path) -> None:
        made.open(str(tmp_path), "run", CONFIG)
        made.metrics(1, {"reward/mean": float("nan"), "mine/thing_s": float("inf"), "eval/a b/mean": 1.0})
        made.samples(1, ())
        made.close()

    def test_changes_nothing_it_is_given(self, made: Any, tmp_path: Path) -> None:
        values, samples = metrics(1), [copy.deepcopy(dict(sample)) for sample in SAMPLES]
        made.open(str(tmp_path), "run", CONFIG)
        made.samples(1, samples)
        made.metrics(1, values)
        made.close()
        assert values == metrics(1), "metrics() changed its argument; copy it first"
        assert samples == [dict(sample) for sample in SAMPLES], "samples() changed its argument; copy it first"

    def test_closes_without_data_and_twice(self, made: Any, tmp_path: Path) -> None:
        made.open(str(tmp_path), "run", CONFIG)
        made.close()
        made.close()

    def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(self, made: Any, tmp_path: Path) -> None:
        _write(made, str(tmp_path), range(1, 5))
        _write(self.make(), str(tmp_path), range(3, 7), offset=1.0)
        shown = self._expect(tmp_path, range(1, 7))
        if shown is not None:
            assert shown["reward/mean"][2] == metrics(2)["reward/mean"], "a resume must keep step 2"
            assert shown["reward/mean"][3] == metrics(3, 1.0)["reward/mean"], "a resume must replace step 3"

    def test_a_rollback_replaces_the_steps_that_it_undoes_or_is_marked(self, made: Any, tmp_path: Path) -> None:
        made.open(str(tmp_path), "run", CONFIG)
        for begin, end, offset in ((1, 4, 0.0), (2, 5, 1.0)):
            for step in range(begin, end):
                made.metrics(step, metrics(step, offset))
            if not offset:
                made.rewind(1, 3)
        made.close()
        shown = self._expect(tmp_path, range(1, 5))
        if shown is not None:
            newest = {step: metrics(step, float(step > 1))["reward/mean"] for step in range(1, 5)}
            assert shown["reward/mean"] == newest, (
                "after rewind(1, 3) step 1 stays, and later steps have their new values"
            )
            replaces = type(made).rewind is not Sink.rewind
            assert replaces or shown.get(UNDONE) == {1: 2.0}, "rewind(1, 3) must leave a mark, or remove steps 2 and 3"

    def _expect(self, run_dir: Path, steps: range) -> Shown | None:
        shown = self.read_back(run_dir)
        if shown is not None:
            assert sorted(shown["reward/mean"]) == list(steps)
        return shown


def metrics(step: int, offset: float = 0.0) -> dict[str, float]:
    """Return metrics of a step, with values that are exact in single precision."""
    return {"reward/mean": step / 8 + offset, "time/step_s": 0.5, "samples/dropped/stale": 0.0}


def _write(sink: Sink, run_dir: str, steps: range, offset: float = 0.0) -> None:
    sink.open(run_dir, "run", CONFIG)
    for step in steps:
        sink.samples(step, SAMPLES)
        sink.metrics(step, metrics(step, offset))
        sink.spans(step, SPANS)
    sink.metrics(steps[-1], {"eval/hold-out/mean": 0.5})
    sink.close()
