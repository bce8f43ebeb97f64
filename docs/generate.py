# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of the site that are made from the code: configuration, metrics, command line, kinds.

`python docs/generate.py` writes them, `--check` says which committed page is not what the code says now.
Only the plugins of this repository are described, whatever else is installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

DOCS = Path(__file__).resolve().parent
BOX = ("relax-core", *sorted(folder.name for folder in (DOCS.parent / "plugins").iterdir() if folder.is_dir()))
MADE = "<!-- Made by docs/generate.py from the code; edit that. -->\n\n"


def configuration() -> str:
    from relax_core.options.reference import reference
    from relax_core.plugins.catalogue import Catalogue

    return reference(Catalogue.load(environ={**os.environ, "RELAX_PLUGINS": ",".join(BOX)}))


def metrics() -> str:
    from relax_core.observe.metrics import reference

    return reference()


def kinds() -> str:
    """The table of kinds, and what is in the box of each."""
    from relax_core.api.kinds import KINDS
    from relax_core.plugins.catalogue import Catalogue

    catalogue = Catalogue.load(environ={**os.environ, "RELAX_PLUGINS": ",".join(BOX)})
    lines = ["# Kinds", "", _KINDS, "", "| kind | hook | base class | table | in the box | `relax new` |"]
    lines.append("|---|---|---|---|---|---|")
    for kind in KINDS.values():
        table = f"`[[{kind.table}]]`" if kind.many else f"`[{kind.table}]`" if kind.table else ""
        names = ", ".join(f"`{name}`" for name in catalogue.names(kind.name))
        base = kind.base.rpartition(":")[2]
        lines.append(
            f"| {kind.name} | `{kind.hook}` | `{base}` | {table} | {names} | {'yes' if kind.template else ''} |"
        )
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """Every verb with its arguments and options, as the parser has them."""
    from relax_core.cli.main import app

    return "\n".join(["# Command line", "", _COMMANDS, *_verbs(typer.main.get_command(app), "relax")]) + "\n"


def _verbs(command: Any, path: str) -> Iterator[str]:
    for name in sorted(getattr(command, "commands", {})):
        verb = command.commands[name]
        yield from ("", f"{'##' if path == 'relax' else '###'} `{path} {name}`", "", verb.help or "")
        yield from _parameters(verb)
        yield from _verbs(verb, f"{path} {name}")


def _parameters(verb: Any) -> Iterator[str]:
    shown = [one for one in verb.params if not getattr(one, "hidden", False) and one.name != "help"]
    if shown:
        yield from ("", "| | |", "|---|---|")
    for one in shown:
        is_option = one.param_type_name == "option"
        name = ", ".join((*one.opts, *one.secondary_opts)) if is_option else one.name.upper()
        more = "..." if one.nargs == -1 else ""
        text = (getattr(one, "help", "") or "").replace("|", "\\|").rstrip(".")
        text += "." if text else ""
        yield f"| `{name}{more}` | {text}{_default(one) if is_option else ''} |"


def _default(option: Any) -> str:
    value = option.default
    return f" Default: `{value}`." if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""


_KINDS = """\
What can vary. A plugin offers components of these kinds through the hook; a configuration chooses one by its name in the
table. The kinds are one table in `relax_core/api/kinds.py`; this page, `relax plugins`, `relax new` and the schema are made
from it."""
_COMMANDS = """\
Results go to stdout, progress and logs to stderr; with `--json` exactly one JSON document is on stdout, also of a
verb that fails: `{"error": ..., "type": ..., "exit_code": ...}`, and `field`, `got`, `fix` where the configuration
is wrong. A run that is named may be a directory, a name under the runs folder, or the
start of one. [Exit codes](runs.md#exit-codes)."""
PAGES = {
    "configuration.md": configuration,
    "metrics.md": metrics,
    "cli.md": command_line,
    "kinds.md": kinds,
}


def main(check: bool) -> int:
    """Write all pages, or name those that differ; the number of these."""
    stale = 0
    for name, make in PAGES.items():
        page, path = MADE + make(), DOCS / name
        if check and (not path.is_file() or path.read_text(encoding="utf-8") != page):
            stale += 1
            print(f"docs/{name} is not what the code says; run: python docs/generate.py")
        elif not check:
            path.write_text(page, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
