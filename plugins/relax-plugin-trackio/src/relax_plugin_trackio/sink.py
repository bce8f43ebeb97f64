# SPDX-License-Identifier: Apache-2.0
"""The Trackio sink: metrics, transcripts with media, and configuration in Trackio's local folder, on a server or in a Space."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field

from relax_core.api import ConfigError, Options, Sink, sample_row
from relax_core.media.previews import SampleMedia


class TrackioOptions(Options):
    project: str = "relax"
    """Project of the run."""
    group: str = ""
    """Group of the run, such as the name of a sweep."""
    space: str = ""
    """Hugging Face Space that gets the data, such as `user/charts`; Trackio makes a missing one."""
    server: str = ""
    """Address of your own Trackio server; the variable TRACKIO_WRITE_TOKEN holds its token."""
    transcripts: bool = True
    """True: also log a table with a few transcripts of each step."""
    max_media: int = Field(default=4, ge=0)
    """Number of images, videos and sounds of each step's transcripts to log as well; 0 logs none."""


class Trackio(Sink[TrackioOptions]):
    """A sink that logs to one run of Trackio; a resumed run continues in that run."""

    def __init__(self, options: TrackioOptions | None = None) -> None:
        super().__init__(options)
        self._run: Any = None
        self._media = SampleMedia("", 0)

    def check(self) -> None:
        options = self.options
        if find_spec("trackio") is None:
            fix = "pip install 'relax-plugin-trackio[trackio]'"
            raise ConfigError("sinks.trackio", "trackio without the package trackio", fix)
        if options.space and options.server:
            raise ConfigError("sinks.trackio.server", "both server and space", "choose one of them")
        if options.server and not os.environ.get("TRACKIO_WRITE_TOKEN"):
            fix = "set TRACKIO_WRITE_TOKEN to the token that `trackio show` prints on the server"
            raise ConfigError("sinks.trackio.server", "no write token", fix)
        if options.space:
            from huggingface_hub import get_token

            if not get_token():
                raise ConfigError("sinks.trackio.space", "no account", "run `hf auth login`, or set HF_TOKEN")

    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        import trackio

        _print_nothing()
        options = self.options
        self._media = SampleMedia(run_dir, options.max_media)
        self._run = trackio.init(
            project=options.project, name=_run_name(Path(run_dir), name), group=options.group or None,
            space_id=options.space or None, server_url=options.server or None, config=dict(config), resume="allow",
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if not self.options.transcripts or not samples:
            return
        import trackio

        table = trackio.Table(data=[sample_row(sample) for sample in samples])
        kinds = {"image": trackio.Image, "video": trackio.Video, "audio": trackio.Audio}
        logged: dict[str, Any] = {"transcripts": table}
        with tempfile.TemporaryDirectory(prefix="relax-trackio-") as folder:  # `log` copies the files
            for medium in self._media.take(step, samples):
                file = Path(folder) / f"{medium.number}.{medium.suffix}"
                file.write_bytes(medium.data)
                logged[f"media/{medium.kind}-{medium.number}"] = kinds[medium.kind](str(file), caption=medium.task)
            self._run.log(logged, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def _run_name(run_dir: Path, name: str) -> str:
    """Return the run's name in the project, which the first start makes unique and keeps in the run directory."""
    path = run_dir / "trackio" / "run-name"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}-{secrets.token_hex(3)}", encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _print_nothing() -> None:
    """Silence Trackio's progress, which it prints to stdout, where the results of a command belong."""
    for name in ("trackio", "trackio.run", "trackio.utils", "trackio.deploy"):
        vars(sys.modules[name])["print"] = lambda *_, **__: None
