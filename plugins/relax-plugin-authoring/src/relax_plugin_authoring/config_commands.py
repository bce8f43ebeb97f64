# SPDX-License-Identifier: Apache-2.0
"""The verbs `relax config show | explain | schema` and `relax init`.

An argument that contains `=` is an override; all remaining arguments are files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relax_core.cli.terminal import AsJson, say, split

if TYPE_CHECKING:
    from relax_core.launch import Composed
    from relax_plugin_authoring.documentation import Explained

Arguments = Annotated[
    list[str], typer.Argument(metavar="FILES... [KEY=VALUE]...", help="TOML files or a recipe name, then overrides.")
]
NO_FILE = {"model": {"path": ""}, "data": {"train": ""}}
"""Empty values of the required keys, so that a key can be explained without a file."""


verbs = typer.Typer(help="Show, explain and describe configurations.", no_args_is_help=True)


@verbs.command("show")
def show(arguments: Arguments, as_json: AsJson = False) -> None:
    """Print the resolved configuration as TOML, with the origin of each value that is not a default."""
    from relax_core.runs import to_toml

    composed = composed_from(arguments)
    if as_json:
        say(json.dumps(composed.config.dump(), indent=2))
        return

    def place(key: str) -> str:
        origin = str(composed.origin_of(key))
        return {"default": "", "python": "recipe"}.get(origin, origin)

    say(to_toml(composed.config.dump(), place), nl=False)


@verbs.command("explain")
def explain(
    key: Annotated[str, typer.Argument(help="Configuration key, such as rollout.group_size.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILES]... [KEY=VALUE]...", help="TOML files or a recipe name, then overrides."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a key's value, the origin of the value, and the key's documentation."""
    from dataclasses import asdict

    from relax_plugin_authoring.documentation import explain as explained_key

    explained = explained_key(key, composed_from(arguments or [], checked=False))
    say(json.dumps(asdict(explained), indent=2) if as_json else _in_words(explained))


@verbs.command("schema")
def schema() -> None:
    """Print the JSON schema of a configuration for editors, including the options of installed plugins."""
    from relax_core.launch import Catalogue
    from relax_plugin_authoring.documentation import schema as whole_schema

    document, notes = whole_schema(Catalogue.load())
    for note in notes:
        say(f"relax: {note}", err=True)
    say(json.dumps(document, indent=2))


def composed_from(arguments: list[str], *, checked: bool = True) -> Composed:
    """Compose the files and overrides of a command line without checking paths on disk; print notices on stderr."""
    from relax_core.launch import compose, recipe_layers

    files, overrides = split(arguments)
    layers = recipe_layers(files)[0] if files else files
    base = None if files or checked else NO_FILE
    composed = compose(layers, overrides, base=base, checked=checked, on_disk=False)
    for notice in composed.notices:
        say(f"relax: {notice}", err=True)
    return composed


def init(
    out: Annotated[Path, typer.Argument(metavar="OUT.toml", help="The configuration file to write.")],
    model: Annotated[Path, typer.Option(help="Folder of a Hugging Face model.")],
    data: Annotated[Path, typer.Option(help="Task file in JSON lines.")],
    reward: Annotated[str, typer.Option(help="Name of a reward; see `relax plugins list`.")] = "maths",
    full: Annotated[bool, typer.Option("--full", help="Write every key; unset keys become comments.")] = False,
) -> None:
    """Write a commented configuration for a model and a task file, and check both.

    A turn of the policy is at most half of the model's context.
    """
    from relax_core.api import ConfigError
    from relax_core.api.model_folder import bounded_context
    from relax_core.launch import Catalogue, check_all, core_tables, plan_run
    from relax_plugin_authoring.documentation import starter

    def relative(path: Path) -> str:
        """Return a path relative to the folder of OUT if it lies within, else absolute."""
        path, home = path.absolute(), out.parent.absolute()
        return str(path.relative_to(home)) if path.is_relative_to(home) else str(path)

    for option, path, what in (("--model", model, "folder of a model"), ("--data", data, "task file")):
        if not path.exists():
            raise ConfigError(option, f"{path}, which does not exist", f"give the path of the {what}")
    default = core_tables()["rollout"].model_fields["max_new_tokens"].default
    turn = min(default, max(bounded_context(model) // 2, 1))
    values: dict[str, dict[str, Any]] = {
        "model": {"path": relative(model)},
        "data": {"train": relative(data)},
        "run": {"name": out.stem},
    }
    try:
        with out.open("x", encoding="utf-8") as file:
            values["rollout"] = {"max_new_tokens": turn}
            file.write(starter(values, reward, Catalogue.load() if full else None, full=full))
    except FileExistsError as error:
        raise ConfigError("OUT.toml", f"{out}, which exists", "give another path or delete the file") from error
    except OSError as error:
        raise ConfigError("OUT.toml", f"{out}: {error.strerror}", "give the path of a writable file") from error
    say(out)
    check_all(plan_run([out], []))
    say(f"next: relax try {out}, then relax train {out}", err=True)


def _in_words(explained: Explained) -> str:
    from relax_core.launch import literal

    value = "nothing" if explained.value is None else literal(explained.value)
    lines = [f"{explained.key} = {value}", f"from:    {explained.origin}", f"type:    {explained.type}"]
    lines += [f"default: {explained.default}"] if explained.default else []
    lines += ["", explained.text] if explained.text else []
    lines += ["", explained.component] if explained.component else []
    return "\n".join(lines)
