# SPDX-License-Identifier: Apache-2.0
"""Parts of error texts: the traceback frames that belong to a plugin, and suggestions of similar names."""

from __future__ import annotations

import errno
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from relax_core.api.errors import PluginError, RelaxError, printable

WRITABLE = (
    " (rewards, environments and media processors may change only the folders that `writable` names in their table)"
)
"""Advice for an error of a read-only file system."""
_LONG_NUMBER = re.compile(r"[0-9A-Fa-f_]{3500}")
"""A number of more than 4300 decimal digits; it has about 3570 hexadecimal digits."""
_LOADER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_CORE = os.path.dirname(os.path.dirname(_LOADER)) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = sysconfig.get_path("purelib") + os.sep


def plugin_frames(error: BaseException) -> str:
    """Return an error as Python prints it, without the frames of the core and the standard library.

    For an error in a component of the core, keep the core's frames. Empty if no frame is left.
    """
    shown = traceback.TracebackException.from_exception(error)
    kept = [frame for frame in shown.stack if _foreign(frame.filename)]
    kept = kept or [frame for frame in shown.stack if _component(frame.filename)]
    if not kept and not isinstance(error, SyntaxError):
        return ""
    shown.stack = traceback.StackSummary.from_list(kept)
    return printable("".join(shown.format(chain=False)))


def innermost(error: BaseException) -> str:
    """Return `file:line` of the deepest frame in plugin code; empty without such a frame."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _foreign(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


@contextmanager
def authored(component: str) -> Iterator[None]:
    """Charge the author of a component, such as `sampler Curriculum`, for an error of the body: raise PluginError."""
    try:
        yield
    except RelaxError:
        raise
    except Exception as error:
        raise PluginError(component, said(error), plugin_frames(error)) from error


def said(error: BaseException) -> str:
    """Return type and message of an error on one line."""
    return f"{type(error).__name__}: {message_of(error)}".rstrip(": ").replace("\n", " ")


def message_of(error: BaseException) -> str:
    """Return the message of an error; works for an author's exception whose `__str__` raises."""
    try:
        return printable(str(error)) + WRITABLE * (isinstance(error, OSError) and error.errno == errno.EROFS)
    except Exception as other:
        return f"without a message, since its __str__ raised {type(other).__name__}"


def too_many_digits(text: str) -> str:
    """Describe the fault of a text with a whole number that Python refuses to read, with the number's place."""
    at = found.start() if (found := _LONG_NUMBER.search(text)) else 0
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return f"a whole number of more than 4300 digits: line {line} column {column}"


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return at most three known names that are similar to `name`, the most similar first."""
    from difflib import get_close_matches

    return get_close_matches(name, list(known), n=3, cutoff=0.6)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` if a known name is similar, else the list of all known names."""
    names = sorted(known)
    if close := nearest(name, names):
        return f"did you mean {' or '.join(repr(n) for n in close)}?"
    return f"known names are {', '.join(names)}" if names else "no names are known"


def _foreign(filename: str) -> bool:
    if filename.startswith(_PACKAGES):
        return not filename.startswith(_CORE)
    return not filename.startswith((_CORE, _PYTHON, "<frozen "))


def _component(filename: str) -> bool:
    return filename.startswith(_CORE) and not filename.startswith(_LOADER)
