# SPDX-License-Identifier: Apache-2.0
"""The SwanLab sink: metrics, transcripts with images, and configuration, online or in files for `swanlab sync`."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from relax_core.api import ConfigError, Options, Sink, sample_turns
from relax_core.media.previews import SampleMedia

ID = "id"
"""File of the run's id at the service."""


class SwanLabOptions(Options):
    mode: Literal["online", "offline"] = "online"
    """`online`: send during the run; `offline`: write files in the run directory, which `swanlab sync` sends later."""
    project: str = "relax"
    """Project of the run."""
    workspace: str = ""
    """User or organization of the project; empty: the account's default."""
    group: str = ""
    """Group of the run, such as the name of a sweep."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    transcripts: bool = True
    """True: also log a few transcripts of each step as text."""
    max_media: int = Field(default=4, ge=0)
    """Number of images of each step's transcripts to log as well; 0 logs none."""


class SwanLab(Sink[SwanLabOptions]):
    """A sink that logs to a run of SwanLab, and to a new run after each rollback; a resumed run continues in the newest."""

    def __init__(self, options: SwanLabOptions | None = None) -> None:
        super().__init__(options)
        self._folder, self._name = Path(), ""
        self._run: Any = None
        self._begin: Callable[[str], Any] = lambda name: None
        """Function that begins or continues the run of the id in the run directory, under this name."""
        self._media = SampleMedia("", 0)

    def check(self) -> None:
        if find_spec("swanlab") is None:
            fix = "pip install 'relax-plugin-swanlab[swanlab]'"
            raise ConfigError("sinks.swanlab", "swanlab without the package swanlab", fix)
        if self.options.mode == "online" and not os.environ.get("SWANLAB_API_KEY") and not _key_file().exists():
            fix = 'run `swanlab login`, set SWANLAB_API_KEY, or choose mode = "offline"'
            raise ConfigError("sinks.swanlab", "no API key", fix)

    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        import swanlab
        from swanlab.sdk.internal.pkg import console

        console.c.quiet = True  # SwanLab prints to stdout, where the results of a command belong
        options, folder = self.options, Path(run_dir) / "swanlab"
        self._media = SampleMedia(run_dir, options.max_media, ("image/",))
        folder.mkdir(exist_ok=True)
        look_around = dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False)
        settings = swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}, probe=look_around)

        def begin(shown: str) -> Any:
            return swanlab.init(
                id=_run_id(folder), name=shown, config=dict(config), log_dir=str(folder), resume="allow",
                mode=options.mode, project=options.project, workspace=options.workspace or None,
                group=options.group or None, tags=list(options.tags) or None, reinit=True, settings=settings,
            )  # fmt: skip

        self._begin, self._folder, self._name = begin, folder, name
        self._run = begin(name)

    def rewind(self, step: int, last: int) -> None:
        """Continue in another run of SwanLab, which would ignore a second value of a metric and step."""
        self._run.finish()
        (self._folder / ID).unlink()
        self._run = self._begin(f"{self._name} after step {step}")
        super().rewind(step, last)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if not self.options.transcripts or not samples:
            return
        import swanlab

        texts = [
            swanlab.Text(
                "\n\n".join(f"{role}: {text}" for role, text in sample_turns(sample)) or "(empty)",
                caption=f"{sample.get('task_id')}: reward {sample.get('reward')} ({sample.get('outcome', '')})",
            )
            for sample in samples
        ]
        self._run.log({"transcripts": texts, **self._logged_media(step, samples)}, step=step)

    def _logged_media(self, step: int, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the images of samples by key. SwanLab takes an animated image only as a video."""
        import swanlab

        logged: dict[str, Any] = {}
        for medium in self._media.take(step, samples):
            data, key = io.BytesIO(medium.data), f"media/image-{medium.number}"
            if medium.form == "image/gif":
                logged[key] = swanlab.Video(data, caption=medium.task)
            else:
                from PIL import Image

                logged[key] = swanlab.Image(Image.open(data), caption=medium.task)
        return logged

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def _key_file() -> Path:
    """Return the file in which `swanlab login` keeps the key."""
    folder = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab"
    return Path(folder).expanduser() / ".netrc"


def _run_id(folder: Path) -> str:
    """Return the run's id at the service, which the first start draws and keeps in the run directory."""
    path = folder / ID
    if not path.exists():
        path.write_text(secrets.token_hex(8), encoding="utf-8")
    return path.read_text(encoding="utf-8")
