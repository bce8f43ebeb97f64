# SPDX-License-Identifier: Apache-2.0
"""`compose`: files, mappings and overrides become one checked `RunConfig` that remembers where each value is from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from relax_core.options.checks import combination_errors, samples
from relax_core.options.engines import pool_file_errors
from relax_core.options.layers import Source, plugin_files, read_layers
from relax_core.options.model_folder import file_errors
from relax_core.options.problems import located, origin_at, refuse
from relax_core.options.resolve import resolve
from relax_core.options.run_config import RunConfig
from relax_core.options.stages import Stage, name_of, naming, split
from relax_core.options.teachers import teacher_errors
from relax_core.options.tree import Origin, Tree, merge
from relax_core.plugins.catalogue import Catalogue


@dataclass(frozen=True, slots=True)
class Origins:
    """Where each value was written."""

    tree: Tree

    def of(self, key: str) -> Origin:
        """File and line, `command line`, `python` or `default`."""
        return origin_at(self.tree, key)


@dataclass(frozen=True, slots=True)
class Composed:
    """A configuration with its history."""

    config: RunConfig
    """Of the first stage, where there are several."""
    origins: Origins
    notices: tuple[str, ...] = ()
    """Lines to print: what a change of component dropped."""
    stages: tuple[Stage, ...] = ()
    """Runs one after another; empty: only the one."""


def compose(
    files: Sequence[Source],
    overrides: Sequence[str],
    catalogue: Catalogue,
    base: Mapping[str, Any] | None = None,
    *,
    checked: bool = True,
    on_disk: bool = True,
) -> Composed:
    """Defaults < base < files left to right (paths, or mappings from Python) < overrides `a.b.c=VALUE`.

    Raises ConfigError or ConfigProblems. `checked`: refuse combinations that can't work; `on_disk`: look at the
    model folder and the task files too.
    """
    tree, notices = read_layers([base or {}, *files], overrides, Path.cwd())
    rest, layers = split(tree)
    if not layers:
        return Composed(_resolved(rest, catalogue, checked, on_disk), Origins(rest), tuple(notices))
    stages = []
    for at, layer in enumerate(layers):
        own = {key: item for key, item in layer.items() if key != "name"}
        with naming(at):
            config = _resolved(cast(Tree, merge(rest, own, notices)), catalogue, checked, on_disk)
        stages.append(Stage(name_of(layer, at), config))
    return Composed(stages[0].config, Origins(rest), tuple(notices), tuple(stages))


def _resolved(tree: Tree, catalogue: Catalogue, checked: bool, on_disk: bool) -> RunConfig:
    config = resolve(tree, catalogue)
    problems = combination_errors(config, catalogue) if checked else []
    if checked and on_disk:
        problems += file_errors(config, samples(config, catalogue))
        problems += [*pool_file_errors(config), *teacher_errors(config, catalogue)]
    refuse(located(problem, tree) for problem in problems)
    return config


def load(
    files: Sequence[Source],
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    *,
    checked: bool = True,
    on_disk: bool = True,
) -> tuple[Composed, Catalogue]:
    """`compose` with the catalogue of what is installed and of the files that `plugins` names."""
    catalogue = Catalogue.load(plugin_files(files, overrides, base))
    return compose(files, overrides, catalogue, base, checked=checked, on_disk=on_disk), catalogue
