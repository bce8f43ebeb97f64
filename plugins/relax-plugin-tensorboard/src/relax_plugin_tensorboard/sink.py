# SPDX-License-Identifier: Apache-2.0
"""The TensorBoard sink: scalars and a few transcripts as event files, written by the `tensorboard` package alone.

A resumed run continues in the same folder: TensorBoard is told from which step on the former data no longer hold,
so that no step shows twice. Every record is written through; a killed run loses at most the step in progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.api import Options, Sink

if TYPE_CHECKING:
    from relax_plugin_tensorboard.event_file import EventFile


class TensorBoardOptions(Options):
    directory: str = "tensorboard"
    """Where the event files go; a relative path is inside the run directory."""
    transcripts: bool = True
    """Also write a few transcripts of each step as text."""


class TensorBoard(Sink[TensorBoardOptions]):
    """`[[sinks]] name = "tensorboard"`; look with `tensorboard --logdir runs`."""

    def __init__(self, options: TensorBoardOptions | None = None) -> None:
        super().__init__(options)
        self._writer: EventFile | None = None
        self._before: dict[str, int] = {}
        """Tag to last step, as an earlier session of the run left them; empty once the new session's start is known."""

        self._held: list[tuple[int, list[str]]] = []
        """Transcripts that came before the session's start was known: rollout may be steps ahead of training."""

    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        from relax_plugin_tensorboard.event_file import EventFile, written

        folder = Path(run_dir) / self.options.directory
        self._before = written(folder)
        self._writer = EventFile(folder)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        new = self._continue_at(step, values)
        if new:
            self._file.scalars(step, new)
        if not self._before:
            self._write_held()

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if self.options.transcripts and samples:
            self._held.append((step, [_markdown(sample) for sample in samples]))
        if not self._before:
            self._write_held()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_held(self) -> None:
        for step, texts in self._held:
            self._file.texts(step, "transcripts", texts)
        self._held.clear()

    @property
    def _file(self) -> EventFile:
        if self._writer is None:
            raise RuntimeError("the TensorBoard sink is not open")
        return self._writer

    def _continue_at(self, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        """At the first data of a resumed session: end the former data there; returns what is not there already."""
        if not self._before:
            return values
        # The step a run resumes at may be evaluated again: its training data hold, and the old evaluation too.
        again = all(key.startswith("eval/") for key in values)
        self._file.start(step + 1 if again else step)
        before = self._before
        if again:
            return {key: value for key, value in values.items() if before.get(key, -1) < step}
        self._before = {}
        return values


def _markdown(sample: Mapping[str, Any]) -> str:
    """A transcript; indented so that Markdown leaves the policy's words alone."""
    turns = [(str(turn.get("role", "")), turn.get("content")) for turn in sample.get("messages") or ()]
    turns += [("response", sample["response"])] if sample.get("response") is not None else []
    head = f"**reward {sample.get('reward')}** ({sample.get('outcome', '')})"
    bodies = [f"{role}\n\n" + "\n".join(f"    {line}" for line in str(said).splitlines()) for role, said in turns]
    return "\n\n".join([head, *bodies])
