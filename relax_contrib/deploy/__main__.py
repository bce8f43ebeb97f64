# SPDX-License-Identifier: Apache-2.0
"""`python -m relax_contrib.deploy FOLDER` copies the files of this package to a folder, where a person edits them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def files() -> list[Path]:
    """Return the files to copy, by name: all files of this folder except Python's."""
    return sorted(path for path in HERE.iterdir() if path.is_file() and path.suffix != ".py")


def main(words: Sequence[str]) -> int:
    """Copy the files to the folder that `words` name; return the exit code. An existing file is never replaced."""
    if len(words) != 1 or words[0].startswith("-"):
        print("usage: python -m relax_contrib.deploy FOLDER", file=sys.stderr)
        return 2
    folder = Path(words[0])
    present = [path.name for path in files() if (folder / path.name).exists()]
    if present:
        print(f"{folder} already has {', '.join(present)}; name another folder, or move them away", file=sys.stderr)
        return 2
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in files():
            shutil.copy(path, folder / path.name)
    except OSError as error:
        print(f"{folder}: {error.strerror}; name a folder that you can write to", file=sys.stderr)
        return 2
    print("\n".join(str(folder / path.name) for path in files()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
