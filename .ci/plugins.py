# SPDX-License-Identifier: Apache-2.0
"""Write every list of this repository's plugins from the folders in plugins/.

`python .ci/plugins.py` writes the lists; `--check` reports those that differ. The lists are:

- in pyproject.toml, each array that names the modules of plugins, and each extra that a plugin joins by
  `[tool.relax] extras` in its own pyproject.toml;
- relax_core/registry/plugins.json: the distribution to install for each component, command and part hook, for errors that
  recommend it;
- relax_core/registry/default_tables.json: the default of each configuration table of a plugin, which older runs wrote out.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_core.registry.catalogue import Catalogue

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = {
    folder.name: tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    for folder in sorted((ROOT / "plugins").iterdir())
    if (folder / "pyproject.toml").is_file()
}
"""The pyproject.toml of each plugin by its distribution's name."""
MODULES = re.compile(r'("relax_plugin_\w+",?\s*)+')
EXTRA = re.compile(r'^(?P<extra>[\w-]+) = \[\n(?:    .*\n)*?(?P<names>(?:    "relax-plugin-[\w-]+",\n)+)', re.MULTILINE)


def project(text: str) -> str:
    """Return the text of pyproject.toml with the lists of plugins as the folders have them."""

    def joined(old: str, names: list[str]) -> str:
        between = re.search(r",\s+", old)
        end = re.search(r",?\s*$", old)
        assert between is not None and end is not None
        return between[0].join(f'"{name}"' for name in names) + end[0]

    def extra(match: re.Match[str]) -> str:
        members = [
            name
            for name, made in PLUGINS.items()
            if match["extra"] in made.get("tool", {}).get("relax", {}).get("extras", ())
        ]
        return match[0].replace(match["names"], "".join(f'    "{name}",\n' for name in members))

    modules = [name.replace("-", "_") for name in PLUGINS]
    return EXTRA.sub(extra, MODULES.sub(lambda match: joined(match[0], modules), text))


def catalogue() -> Catalogue:
    from relax_core.registry.catalogue import Catalogue

    return Catalogue.load(environ={**os.environ, "RELAX_PLUGINS": ",".join(PLUGINS)})


def offers(_: str) -> str:
    """Return the distribution to install for each component, command and part hook, by kind and name."""
    by_kind: dict[str, dict[str, str]] = defaultdict(dict)
    for record in catalogue().records:
        if record.distribution in PLUGINS:
            for kind, component in record.components:
                by_kind[kind][component.name] = record.distribution
            for command in record.commands:
                by_kind["command"][command.name] = record.distribution
            for hook in record.parts:
                by_kind["hook"][hook] = record.distribution
    return json.dumps(by_kind, indent=1, sort_keys=True) + "\n"


def default_tables(_: str) -> str:
    """Return the default of each table of the plugins, by name."""
    own = {name: model() for name, model in catalogue().tables().items()}
    defaults = {name: table.model_dump(mode="json", exclude_none=True) for name, table in own.items()}
    return json.dumps(defaults, indent=1, sort_keys=True) + "\n"


LISTS = {
    "pyproject.toml": project,
    "relax_core/registry/plugins.json": offers,
    "relax_core/registry/default_tables.json": default_tables,
}


def stale() -> Iterator[tuple[Path, str]]:
    """Yield the files whose lists differ, each with the text that it should have."""
    for name, make in LISTS.items():
        path = ROOT / name
        have = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (made := make(have)) != have:
            yield path, made


def main(check: bool) -> int:
    """Write the differing lists, or with `check` print the names of their files and return their number."""
    found = list(stale())
    for path, text in found:
        if check:
            print(f"{path.relative_to(ROOT)} differs from the folders in plugins/; run: python .ci/plugins.py")
        else:
            path.write_text(text, encoding="utf-8")
    return len(found) if check else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
