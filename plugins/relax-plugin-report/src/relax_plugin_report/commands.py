# SPDX-License-Identifier: Apache-2.0
"""The commands `relax bundle` and `relax report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_core.cli.terminal import AsJson, Run, print_json, say


def bundle(
    run: Run = None,
    out: Annotated[Path | None, typer.Option(help="File to write; default: RUN.bundle.tar.gz in this folder.")] = None,
    samples: Annotated[bool, typer.Option("--samples", help="Add the transcripts: prompts and responses.")] = False,
    json: AsJson = False,
) -> None:
    """Pack a run's evidence for a bug report into one archive, without secrets, weights and samples.

    The archive has the configuration, documents, events, metrics, logs and lists of checkpoints. Works on live, killed
    and damaged runs.
    """
    from relax_core.runs import open_run
    from relax_plugin_report.bundle import write_bundle

    written = write_bundle(open_run(run), out, samples)
    if json:
        print_json({"schema": "relax.bundle/1", "file": str(written.file), "files": written.files,
                    "problems": written.problems})  # fmt: skip
        return
    for problem in written.problems:
        say(problem, err=True)
    say(f"{written.file}: {len(written.files)} files; read them before you send the archive")


def report(run: Run = None) -> None:
    """Rewrite a run's report and print its path."""
    from relax_core.runs import open_run
    from relax_plugin_report.report import write_report

    say(str(write_report(open_run(run).path)))
