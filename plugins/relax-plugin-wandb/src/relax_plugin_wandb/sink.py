# SPDX-License-Identifier: Apache-2.0
"""The Weights & Biases sink: metrics, transcripts with media, and configuration, online or in files for `wandb sync`."""

from __future__ import annotations

import netrc
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from relax_core.api import ConfigError, Options, Sink, sample_row
from relax_core.media.previews import SampleMedia

HOST = "https://api.wandb.ai"
STEP = "step"
"""Name of the metric that charts have as their x axis.

The service drops data of an earlier step than its newest, but evaluations and transcripts may be late. So the step is a
metric like others, and the service's own step only counts the calls.
"""


class WandbOptions(Options):
    mode: Literal["online", "offline"] = "online"
    """`online`: send during the run; `offline`: write files in the run directory, which `wandb sync` sends later."""
    project: str = "relax"
    """Project of the run."""
    entity: str = ""
    """User or team of the project; empty: the account's default."""
    group: str = ""
    """Group of the run, such as the name of a sweep."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    transcripts: bool = True
    """True: also log a table with a few transcripts of each step."""
    max_media: int = Field(default=4, ge=0)
    """Number of images, videos and sounds of each step's transcripts to log as well; 0 logs none."""


class WeightsAndBiases(Sink[WandbOptions]):
    """A sink that logs to one run of Weights & Biases; a resumed run continues in that run."""

    def __init__(self, options: WandbOptions | None = None) -> None:
        super().__init__(options)
        self._run: Any = None
        self._media = SampleMedia("", 0)

    def check(self) -> None:
        base = os.environ.get("WANDB_BASE_URL", HOST)
        if self.options.mode == "online" and not os.environ.get("WANDB_API_KEY") and not _netrc_names(base):
            fix = 'run `wandb login`, set WANDB_API_KEY, or choose mode = "offline"'
            raise ConfigError("sinks.wandb", f"no API key for {base}", fix)

    def open(self, run_dir: str, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        options = self.options
        self._media = SampleMedia(run_dir, options.max_media)
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
        self._run = wandb.init(
            id=_run_id(Path(run_dir)), name=name, config=dict(config), dir=run_dir, resume="allow", mode=options.mode,
            project=options.project, entity=options.entity or None, group=options.group or None,
            tags=options.tags or None, reinit="create_new", settings=settings,
        )  # fmt: skip
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if not self.options.transcripts or not samples:
            return
        import wandb

        rows = [sample_row(sample) for sample in samples]
        table = wandb.Table(list(rows[0]), [list(row.values()) for row in rows])
        with tempfile.TemporaryDirectory(prefix="relax-wandb-") as folder:
            self._run.log({"transcripts": table, **self._logged_media(Path(folder), step, samples), STEP: step})

    def _logged_media(self, folder: Path, step: int, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the media of samples by key. They are files of `folder`, which `log` copies."""
        import wandb

        kinds = {"image": wandb.Image, "video": wandb.Video, "audio": wandb.Audio}
        logged = {}
        for medium in self._media.take(step, samples):
            file = folder / f"{medium.number}.{medium.suffix}"
            file.write_bytes(medium.data)
            logged[f"media/{medium.kind}-{medium.number}"] = kinds[medium.kind](str(file), caption=medium.task)
        return logged

    def close(self) -> None:
        if self._run is not None:
            import wandb

            self._run.finish()
            self._run = None
            if wandb.run is None:  # no run of the process's own code needs the service
                wandb.teardown()  # waits until the service has written its files; `finish` does not


def _netrc_names(base: str) -> bool:
    """Return True if the file in which `wandb login` keeps keys has one for this server."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(path).authenticators(urlsplit(base).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _run_id(run_dir: Path) -> str:
    """Return the run's id at the service, which the first start draws and keeps in the run directory."""
    path = run_dir / "wandb" / "run-id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(8), encoding="utf-8")
    return path.read_text(encoding="utf-8")
