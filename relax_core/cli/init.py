# SPDX-License-Identifier: Apache-2.0
"""`relax init`: write a commented TOML to start from. It never overwrites a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def add(app: typer.Typer) -> None:
    """Hang the verb into the command line."""
    app.command("init")(init)


def init(
    out: Annotated[Path, typer.Argument(metavar="OUT.toml", help="The file to write.")],
    model: Annotated[Path, typer.Option(help="Folder of a Hugging Face model.")],
    data: Annotated[Path, typer.Option(help="Task file, JSON lines.")],
    reward: Annotated[str, typer.Option(help="Reward by name; see `relax plugins list`.")] = "maths",
) -> None:
    """Write a commented configuration for a model and a task file."""
    from relax_core.api.errors import ConfigError
    from relax_core.config.documentation import relative, starter

    for option, path, what in (("--model", model, "folder of a model"), ("--data", data, "task file")):
        if not path.exists():
            raise ConfigError(option, f"{path}, which does not exist", f"name the {what}")
    text = starter(relative(model, out.parent), relative(data, out.parent), reward, out.stem)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError("OUT.toml", f"{out}, which exists", "name another file or delete it") from error
    except OSError as error:
        raise ConfigError("OUT.toml", f"{out}: {error.strerror}", "name a file that can be written") from error
    print(out)
    print(f"next: relax train {out}", file=sys.stderr)
