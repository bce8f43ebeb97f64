# SPDX-License-Identifier: Apache-2.0
"""The TensorBoard sink: writes scalars, a few transcripts and their media to event files, without torch or TensorFlow.

A resumed run continues in the same folder. After a resume and after a rollback, the sink marks the step from which
TensorBoard ignores earlier data, so no step is shown twice. Every record is flushed, so a killed run loses at most the
step in progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from relax_core.api import Options, Sink, sample_turns
from relax_core.media.previews import SampleMedia

if TYPE_CHECKING:
    from relax_plugin_tensorboard.event_file import EventFile


class TensorBoardOptions(Options):
    directory: str = "tensorboard"
    """Folder of the event files; a relative path starts in the run directory."""
    transcripts: bool = True
    """True: also write a few transcripts of each step as text."""
    max_media: int = Field(default=4, ge=0)
    """Number of images and WAV sounds of each step's transcripts to write as well; 0 writes none."""


class TensorBoard(Sink[TensorBoardOptions]):
    """A sink for TensorBoard; view its files with `tensorboard --logdir runs`."""

    def __init__(self, options: TensorBoardOptions | None = None) -> None:
        super().__init__(options)
        self._writer: EventFile | None = None
        self._before: dict[str, int] = {}
        """Last step of each tag in earlier sessions' files; empty after this session has written its first training
        step."""

        self._media = SampleMedia("", 0)
        self._held: list[tuple[int, Sequence[Mapping[str, Any]]]] = []
        """Steps and their samples, held back until `_before` is empty, since rollout may be ahead of training."""

    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        from relax_plugin_tensorboard.event_file import EventFile, written

        folder = Path(run_dir) / self.options.directory
        self._before = written(folder)
        self._media = SampleMedia(run_dir, self.options.max_media, ("image/", "audio/wav"))
        self._writer = EventFile(folder)
        # TensorBoard reads a folder's first mark as the beginning, and obeys only later marks, so this mark hides nothing.
        self._writer.start(max(self._before.values(), default=-1) + 1)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        new = self._continue_at(step, values)
        if new:
            self._file.scalars(step, new)
        if not self._before:
            self._write_held()

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if self.options.transcripts and samples:
            self._held.append((step, samples))
        if not self._before:
            self._write_held()

    def rewind(self, step: int, last: int) -> None:
        self._file.start(step + 1)
        self._before = {tag: min(newest, step) for tag, newest in self._before.items()}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write_held(self) -> None:
        for step, samples in self._held:
            self._file.texts(step, "transcripts", [_markdown(sample) for sample in samples])
            media = self._media.take(step, samples)
            if images := [medium.data for medium in media if medium.kind == "image"]:
                self._file.images(step, "media/images", images)
            if sounds := [(medium.data, medium.task) for medium in media if medium.kind == "audio"]:
                self._file.sounds(step, "media/sounds", sounds)
        self._held.clear()

    @property
    def _file(self) -> EventFile:
        if self._writer is None:
            raise RuntimeError("the TensorBoard sink is not open; call open() first")
        return self._writer

    def _continue_at(self, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        """Return the values to write; in a resumed session, make readers ignore earlier data from this step on.

        A step that is only evaluated again keeps its earlier data; values that already exist are not returned.
        """
        if not self._before:
            return values
        # A run may evaluate the step that it resumes at again: keep the step's training data and its earlier evaluation.
        again = all(key.startswith("eval/") for key in values)
        self._file.start(step + 1 if again else step)
        before = self._before
        if again:
            return {key: value for key, value in values.items() if before.get(key, -1) < step}
        self._before = {}
        return values


def _markdown(sample: Mapping[str, Any]) -> str:
    """Return a transcript as Markdown, indented as code so that the policy's text is not interpreted."""
    head = f"**reward {sample.get('reward')}** ({sample.get('outcome', '')})"
    bodies = [
        f"{role}\n\n" + "\n".join(f"    {line}" for line in text.splitlines()) for role, text in sample_turns(sample)
    ]
    return "\n\n".join([head, *bodies])
