# SPDX-License-Identifier: Apache-2.0
"""The commands `relax new`, `relax plugins check` and `relax plugins publish`."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_core.cli.terminal import AsJson, Named, say

if TYPE_CHECKING:
    from relax_plugin_authoring.check import CheckOutcome


def check_plugins(
    name: Named = "",
    slow: Annotated[
        bool, typer.Option("--slow", help="Also run the suites of engines and trainers, which take minutes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check plugins: import, handshake, options, conformance suites.

    All plugins are checked by default. Slow suites run with --slow, or if NAME is given. Progress goes to stderr. The
    exit code is 3 if a check fails.
    """
    from relax_core.launch import Catalogue, selected
    from relax_plugin_authoring.check import CheckResult, check

    files = (str(Path(name).resolve()),) if name.endswith(".py") else ()
    catalogue = Catalogue.load(files)
    records = selected(catalogue, files[0] if files else name) if name else catalogue.records
    checks: list[CheckOutcome] = []
    shown: set[str] = set()
    for item in check(catalogue, records, files, slow=slow or bool(name), progress=partial(say, err=True)):
        checks.append(item)
        if not as_json and item.verdict is not CheckResult.PASSED and f"{item.subject}{item.detail}" not in shown:
            shown.add(f"{item.subject}{item.detail}")
            say(f"{item.verdict:7} {item.subject or item.distribution}: {item.name}: {item.detail}")
    counts = Counter(str(item.verdict) for item in checks)
    if as_json:
        verdicts = {str(verdict): counts[verdict] for verdict in CheckResult}
        say(json.dumps({"schema": 1, **verdicts, "checks": [item.as_dict() for item in checks]}, indent=2))
    else:
        say(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    if counts["failed"]:
        first = next(item for item in checks if item.verdict is CheckResult.FAILED)
        say(f"relax: {first.subject or first.distribution}: {first.name} failed; fix the plugin", err=True)
        raise typer.Exit(3)


def publish_plugin(
    project: Annotated[Path, typer.Argument(help="Folder of the plugin's project, with a pyproject.toml.")] = Path(),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check; keep no built files.")] = False,
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolation/--no-isolation", help="Install the build backend for the build, or use the installed."
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Check a plugin project before its upload to a package index: build, metadata, entry points, components.

    Relax uploads nothing. Without --dry-run, the built files are kept in the folder dist of the project, and the command
    that uploads the files is printed. The exit code is 3 if the project must be corrected before an upload.
    """
    from relax_plugin_authoring.publish import publish

    say(f"building {project.resolve()}", err=True)
    done = publish(project, dry_run=dry_run, isolated=isolated)
    if as_json:
        say(json.dumps(done.as_dict(), indent=2))
    else:
        for finding in done.findings:
            say(finding)
        for file in done.files:
            say(file)
    if not done.ready:
        count = sum(finding.blocks for finding in done.findings)
        say(f"relax: {project}: {count} findings block the upload; correct them", err=True)
        raise typer.Exit(3)
    if done.files:
        say(f"next: twine upload {' '.join(map(str, done.files))}", err=True)
    else:
        say("ready: without --dry-run, the built files are kept and the command that uploads them is printed", err=True)


def new(
    kind: Annotated[
        str,
        typer.Argument(
            help="Kind of component, such as reward, sink or sampler, or command: `relax plugins list` shows kinds."
        ),
    ],
    name: Annotated[str, typer.Argument(help="Name of the component or command, in kebab-case.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="A single-file plugin to move into the project.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder in which the project folder is created.")] = Path(),
    spdx: Annotated[
        str, typer.Option("--license", help="License of the project, as an SPDX expression such as MIT.")
    ] = "Apache-2.0",
) -> None:
    """Create a plugin project with code, tests and packaging."""
    from relax_plugin_authoring.new_project import bake

    project = bake(kind, name, out, source, spdx)
    say(project)
    say(f"next: pip install -e '{project}[test]' && relax plugins check {project.name}", err=True)
