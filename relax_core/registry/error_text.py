# SPDX-License-Identifier: Apache-2.0
"""Texts of errors: the frames of a traceback that belong to a plugin, without the core's own, and names that are near one."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable

import relax_core

_CORE = os.path.dirname(os.path.abspath(relax_core.__file__)) + os.sep
_LOADER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = sysconfig.get_path("purelib") + os.sep


def plugin_frames(error: BaseException) -> str:
    """The error as Python prints it, without the frames of the core and of the standard library.

    A component of the core itself keeps its own. Empty where nothing of a plugin ran.
    """
    shown = traceback.TracebackException.from_exception(error)
    kept = [frame for frame in shown.stack if _foreign(frame.filename)]
    kept = kept or [frame for frame in shown.stack if _component(frame.filename)]
    if not kept and not isinstance(error, SyntaxError):
        return ""
    shown.stack = traceback.StackSummary.from_list(kept)
    return "".join(shown.format(chain=False))


def innermost(error: BaseException) -> str:
    """`file:line` of the deepest frame inside the plugin; empty where no frame is."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _foreign(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def said(error: BaseException) -> str:
    """Type and message of an error in one line."""
    return f"{type(error).__name__}: {error}".rstrip(": ").replace("\n", " ")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Find at most three known names that are close to this one, nearest first."""
    from difflib import get_close_matches

    return get_close_matches(name, list(known), n=3, cutoff=0.6)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say `did you mean 'x'?` where something is near, else all there is."""
    names = sorted(known)
    if close := nearest(name, names):
        return f"did you mean {' or '.join(repr(n) for n in close)}?"
    return f"known are {', '.join(names)}" if names else "there is none"


def _foreign(filename: str) -> bool:
    if filename.startswith(_PACKAGES):
        return not filename.startswith(_CORE)
    return not filename.startswith((_CORE, _PYTHON, "<frozen "))


def _component(filename: str) -> bool:
    return filename.startswith(_CORE) and not filename.startswith(_LOADER)
