# SPDX-License-Identifier: Apache-2.0
"""The ClearML sink: metrics, transcripts with media, and configuration in an offline session, which ClearML imports later."""

from __future__ import annotations

import io
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field

from relax_core.api import ConfigError, Options, Sink, sample_row
from relax_core.media.previews import SampleMedia

CACHE = "CLEARML_CACHE_DIR"
"""Variable that names the folder in which ClearML writes sessions, until they are closed."""
AUTOMATIC = (
    "matplotlib", "tensorflow", "tensorboard", "pytorch", "xgboost", "scikit", "fastai", "lightgbm", "hydra",
    "detect_repository", "tfdefines", "joblib", "megengine", "catboost", "gradio",
)  # fmt: skip
"""Records that ClearML would make by itself; `detect_repository`: the code of the program, with uncommitted changes."""


class ClearMLOptions(Options):
    project: str = "relax"
    """Project of the run."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    transcripts: bool = True
    """True: also log a table with a few transcripts of each step."""
    max_media: int = Field(default=4, ge=0)
    """Number of images, videos and sounds of each step's transcripts to log as well; 0 logs none."""


class ClearML(Sink[ClearMLOptions]):
    """A sink that writes an offline session of ClearML for each start of a run.

    A session has a new id, because ClearML's server gives the task's id when it imports the session.
    """

    def __init__(self, options: ClearMLOptions | None = None) -> None:
        super().__init__(options)
        self._task: Any = None
        self._folder = Path()
        self._tables = 0
        """Number of tables that this start has logged."""
        self._cache_before: str | None = None
        self._media = SampleMedia("", 0)

    def check(self) -> None:
        if find_spec("clearml") is None:
            fix = "pip install 'relax-plugin-clearml[clearml]'"
            raise ConfigError("sinks.clearml", "clearml without the package clearml", fix)

    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        self._folder = Path(run_dir).absolute() / "clearml"
        self._folder.mkdir(exist_ok=True)
        self._media = SampleMedia(run_dir, self.options.max_media)
        self._cache_before = os.environ.get(CACHE)
        os.environ[CACHE] = str(self._folder)
        from clearml import Task

        with redirect_stdout(sys.stderr):  # ClearML prints to stdout, where the results of a command belong
            Task.set_offline(True)
            self._task = Task.init(
                project_name=self.options.project, task_name=name, tags=list(self.options.tags),
                reuse_last_task_id=False, auto_connect_frameworks=dict.fromkeys(AUTOMATIC, False),
                auto_connect_arg_parser=False, auto_connect_streams=False, auto_resource_monitoring=False,
            )  # fmt: skip
            self._task.connect_configuration(dict(config), name="relax")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        logger = self._task.get_logger()
        for key, value in values.items():
            if math.isfinite(value):  # ClearML would store 0 instead
                group, _, name = key.partition("/")
                logger.report_scalar(title=group, series=name or group, value=value, iteration=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if not self.options.transcripts or not samples:
            return
        rows = [sample_row(sample) for sample in samples]
        self._tables += 1
        table = [list(rows[0]), *(list(row.values()) for row in rows)]
        self._task.get_logger().report_table("transcripts", f"table {self._tables}", step, table_plot=table)
        for medium in self._media.take(step, samples):
            name = f"{medium.kind}-{medium.number}"
            data = io.BytesIO(medium.data)
            self._task.get_logger().report_media("media", name, step, stream=data, file_extension=medium.suffix)

    def close(self) -> None:
        if self._task is None:
            return
        unpacked = Path(self._task.get_offline_mode_folder())
        with redirect_stdout(sys.stderr):
            self._task.close()  # and stay offline: to switch back, ClearML would log in
        self._task = None
        count = len(list(self._folder.glob("session-*.zip")))
        unpacked.with_name(f"{unpacked.name}.zip").rename(self._folder / f"session-{count + 1}.zip")
        shutil.rmtree(unpacked.parent)
        os.environ.pop(CACHE)
        if self._cache_before is not None:
            os.environ[CACHE] = self._cache_before
