# SPDX-License-Identifier: Apache-2.0
"""The configuration tables that plugins own, by the catalogue of components."""

from __future__ import annotations

from relax_core.api.errors import ConfigError
from relax_core.api.options import TableOptions
from relax_core.config.layers import Node, plain
from relax_core.config.problems import unknown_key
from relax_core.config.run_config import table_keys, top_level_keys
from relax_core.registry.catalogue import Catalogue, default_tables, unloaded


def all_tables(catalogue: Catalogue) -> dict[str, list[str]]:
    """Return every table of the core and of plugins with its keys; options of components are not included."""
    return {**table_keys(), **{name: list(table.model_fields) for name, table in catalogue.tables().items()}}


def find_table(name: str, node: Node, catalogue: Catalogue) -> type[TableOptions] | None:
    """Return the class of the table `name` of a configuration.

    Return None for a table that equals the default of a plugin that is not loaded: older runs wrote out such tables,
    and the table has no effect. Raises ConfigError for an unknown or ambiguous name and for an absent plugin, PluginError
    for a broken plugin.
    """
    if name in catalogue.names("table"):
        try:
            return catalogue.table(name)
        except ConfigError as error:
            raise ConfigError(name, "a table", error.fix) from error
    absent = unloaded("table", name, catalogue.records)
    if absent is None:
        tables = all_tables(catalogue)
        raise unknown_key(name, [*top_level_keys(), *tables], tables)
    written, default = plain(node), default_tables().get(name, {})
    if isinstance(written, dict) and written.items() <= default.items():
        return None
    raise ConfigError(name, "a table", absent.fix) if isinstance(absent, ConfigError) else absent
