# SPDX-License-Identifier: Apache-2.0
"""The part of a traceback that belongs to a plugin: what its author needs to see, without the core's own frames."""

from __future__ import annotations

import os
import sysconfig
import traceback

import relax_core

_CORE = os.path.dirname(os.path.abspath(relax_core.__file__)) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = sysconfig.get_path("purelib") + os.sep


def plugin_frames(error: BaseException) -> str:
    """The error as Python prints it, with the frames of the core and of the standard library left out.

    Where all of its frames are the core's (the plugin is one of ours), they are kept.
    """
    shown = traceback.TracebackException.from_exception(error, limit=None)
    inside = [frame for frame in shown.stack if _foreign(frame.filename)]
    shown.stack = traceback.StackSummary.from_list(inside or list(shown.stack))
    return "".join(shown.format(chain=False))


def innermost(error: BaseException) -> str:
    """`file:line` of the deepest frame inside the plugin; empty where no frame is."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _foreign(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def said(error: BaseException) -> str:
    """Type and message of an error in one line."""
    return f"{type(error).__name__}: {error}".rstrip(": ").replace("\n", " ")


def _foreign(filename: str) -> bool:
    if filename.startswith(_PACKAGES):
        return not filename.startswith(_CORE)
    return not filename.startswith((_CORE, _PYTHON, "<frozen "))
