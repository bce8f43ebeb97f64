# SPDX-License-Identifier: Apache-2.0
"""How a verb ends that did not succeed: a line on stderr, an exit code, and with `--json` one document on stdout.

The document is `{"schema": "relax.error/1", "error": ..., "type": ..., "exit_code": ...}`, with `field`, `got`, `fix` where the
configuration is wrong and `errors` where several things are. Only frames of a plugin are shown; `RELAX_TRACEBACK=1`
shows the core's own too.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

from relax_core.api.errors import ConfigError, PluginError, RelaxError

INTERRUPTED = 130
USAGE = 2
_TRACEBACK = "RELAX_TRACEBACK"


def fail(error: BaseException) -> int:
    """Say what is wrong; returns the exit code."""
    document = described(error)
    if isinstance(error, PluginError) and error.frames:
        print(error.frames.rstrip(), file=sys.stderr)
    elif os.environ.get(_TRACEBACK):
        traceback.print_exception(error)
    print(f"relax: {document['error']}", file=sys.stderr)
    _on_stdout(document)
    return int(document["exit_code"])


def refuse(usage: Any) -> int:
    """The same for words that the command line does not understand: `usage` is Typer's error."""
    usage.show()
    _on_stdout(_document("UsageError", usage.format_message(), USAGE))
    return USAGE


def interrupted() -> int:
    """A signal came before there was anything to save."""
    print("relax: interrupted", file=sys.stderr)
    _on_stdout(_document("Interrupted", "interrupted", INTERRUPTED))
    return INTERRUPTED


def described(error: BaseException) -> dict[str, Any]:
    """An error as plain data."""
    if not isinstance(error, RelaxError):
        return _document(type(error).__name__, _unexpected(error), 1)
    more: dict[str, Any] = {}
    if isinstance(error, ConfigError):
        more = {"field": error.field, "got": str(error.got), "fix": error.fix}
    if several := getattr(error, "errors", ()):
        more["errors"] = [described(one) for one in several]
    if isinstance(error, PluginError):
        more = {"component": error.component, "frames": error.frames}
    return {**_document(type(error).__name__, str(error), error.exit_code), **more}


def _document(kind: str, error: str, exit_code: int) -> dict[str, Any]:
    return {"schema": "relax.error/1", "error": error, "type": kind, "exit_code": exit_code}


def _unexpected(error: BaseException) -> str:
    """A fault of ours: where it happened, and how to see all of it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return (
        f"unexpected {type(error).__name__}: {error}{where}; this is a fault of relax: "
        f"run it again with {_TRACEBACK}=1 and report what it prints"
    )


def _on_stdout(document: dict[str, Any]) -> None:
    if "--json" in sys.argv[1:]:
        from relax_core.observe.documents import encode

        print(encode(document))
