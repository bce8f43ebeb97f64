# SPDX-License-Identifier: Apache-2.0
"""Tables that plugins own: validated, documented and explained as tables of the core, and written only if they are set."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from relax_plugin_authoring.documentation import explain, reference, schema, starter

from relax_core.api.component import BY_TABLE, CORE_KEYS
from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.options import Options, Secret, TableOptions
from relax_core.config.compose import STAGES, compose, parse_config
from relax_core.config.run_config import Core, to_toml
from relax_core.control.resume_keys import may_change
from relax_core.registry import catalogue as catalogue_module
from relax_core.registry.catalogue import Catalogue
from tests.unit.config.conftest import catalogue_of_tests


class Inner(Options):
    size: int = 1
    """Size of the inner table."""


class Budget(TableOptions):
    """Limits on the cost of a run."""

    may_change: ClassVar[tuple[str, ...]] = ("most", "inner")
    of_the_run: ClassVar[bool] = True

    most: float = 5.0
    """Largest cost, in euros."""
    key: Secret | None = None
    """Key of the service that knows the prices."""
    file: Path | None = None
    """File of prices."""
    inner: Inner = Inner()
    """A table in the table."""

    def problems(self, config: Mapping[str, Any]) -> Iterator[ConfigError]:
        if self.most < 0:
            raise RuntimeError("a bug")
        if self.most < config["steps"] / 100:
            yield ConfigError("budget.most", self.most, f"{config['steps']} steps cost more")


@pytest.fixture
def tables() -> Catalogue:
    catalogue = catalogue_of_tests()
    catalogue.add("table", "budget", Budget)
    return catalogue


def test_the_names_that_plugins_may_not_take_are_those_of_the_core() -> None:
    assert {*Core.model_fields, STAGES} == CORE_KEYS and not CORE_KEYS & set(BY_TABLE)


def test_a_table_is_typed_written_if_it_is_set_and_read_again(folder: Path, tables: Catalogue) -> None:
    (folder / "more.toml").write_text('[budget]\nkey = "file:key"\nfile = "prices"\ninner.size = 3\n')
    composed = compose(["my.toml", "more.toml"], ["budget.most=7"], tables)
    budget = composed.config.table(Budget)
    assert (budget.most, budget.file, budget.inner.size) == (7.0, folder / "prices", 3)
    assert budget.key is not None and budget.key.reference == f"file:{folder / 'key'}"
    assert str(composed.origin_of("budget.inner.size")) == "more.toml:4"
    dumped = composed.config.dump()
    assert parse_config(tomllib.loads(to_toml(dumped)), tables) == composed.config == parse_config(dumped, tables)
    unset = compose(["my.toml"], [], tables).config
    assert "budget" not in unset.dump() and unset.table(Budget) == Budget()
    assert compose(["my.toml", {"budget": {}}], [], tables).config.dump()["budget"]["most"] == 5.0


@pytest.mark.parametrize(
    ("data", "key", "said"),
    [
        ({"budgt": {"most": 1}}, "budgt", "did you mean 'budget'"),
        ({"budget": {"mst": 1}}, r"budget\.mst", "did you mean 'most'"),
        ({"run": {"most": 1}}, r"run\.most", r"most is a key of \[budget\]"),
        ({"budget": {"most": "much"}}, r"budget\.most", "valid number"),
        ({"budget": {"key": "hunter2"}}, r"budget\.key", "env:NAME"),
        ({"budget": {"inner": {"sze": 1}}}, r"budget\.inner\.sze", "did you mean 'size'"),
        ({"budget": 3}, "budget", r"write one table, \[budget\]"),
        ({"budget": {"most": 1}}, r"budget\.most", "200 steps cost more"),
        ({"stages": [{"steps": 2}, {"budget": {"most": 9}}]}, r"stages\[1\]\.budget", "move the key out of"),
    ],
)
def test_a_mistake_in_a_table_names_the_key_and_the_fix(
    folder: Path, tables: Catalogue, data: dict[str, Any], key: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"{key}.*{said}") as caught:
        compose(["my.toml", data], [], tables)
    assert "hunter2" not in str(caught.value)


def test_a_table_whose_check_raises_is_the_plugins_fault(folder: Path, tables: Catalogue) -> None:
    with pytest.raises(PluginError, match="table 'budget'.*a bug"):
        compose(["my.toml", {"budget": {"most": -1}}], [], tables)


def test_a_table_is_in_schema_reference_starter_and_explanations(folder: Path, tables: Catalogue) -> None:
    document, _ = schema(tables)
    assert document["properties"]["budget"]["properties"]["most"]["description"] == "Largest cost, in euros."
    assert {*re.findall(r'"#/\$defs/([^"]+)"', json.dumps(document))} <= document["$defs"].keys()
    page = reference(tables)
    assert "## `[budget]`" in page and "Limits on the cost of a run." in page and "`[budget.inner]`" in page
    text = starter({"run": {"name": "new"}}, "maths", tables, full=True)
    assert "[budget]  # Limits on the cost of a run." in text and "# most = 5.0" in text
    composed = compose(["my.toml"], ["budget.most=7"], tables)
    for key, value, origin in (("most", 7.0, "command line"), ("inner.size", 1, "default")):
        explained = explain(f"budget.{key}", composed)
        assert (explained.value, explained.origin) == (value, origin)
    assert explain("budget", composed).value["most"] == 7.0
    with pytest.raises(ConfigError, match="did you mean 'most'"):
        explain("budget.mst", composed)


def test_a_resume_may_change_the_keys_that_the_table_allows(tables: Catalogue) -> None:
    assert may_change("budget.most", tables) and may_change("budget.inner.size", tables)
    assert (
        not may_change("budget.key", tables) and not may_change("budget.most") and not may_change("other.most", tables)
    )


def test_the_default_of_an_absent_plugin_is_accepted_and_a_change_names_what_to_install(
    folder: Path, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older runs wrote out every table, also those that have moved to a plugin."""
    monkeypatch.setitem(catalogue_module.installable(), "table", {"budget": "relax-plugin-budget"})
    monkeypatch.setitem(catalogue_module.default_tables(), "budget", {"most": 5.0, "inner": {"size": 1}})
    for table in ({}, {"most": 5.0}, {"most": 5.0, "inner": {"size": 1}}):
        config = compose(["my.toml", {"budget": table}], [], catalogue).config
        assert "budget" not in config.dump()
    for table in ({"most": 6.0}, {"most": 5.0, "key": "env:KEY"}):
        with pytest.raises(
            ConfigError, match="budget.*a table; its plugin is not installed; pip install relax-plugin-b"
        ):
            compose(["my.toml", {"budget": table}], [], catalogue)


def test_keys_that_moved_to_a_plugin_are_accepted_with_their_default_and_a_change_names_the_new_key(
    folder: Path, catalogue: Catalogue
) -> None:
    """Older runs wrote out the uploads of exports as keys of [export]."""
    config = compose(
        ["my.toml", {"export": {"every": 3, "push_to": "", "push_timeout_s": 3600.0}}], [], catalogue
    ).config
    assert config.export.model_dump() == {"every": 3, "keep": 2}
    for key, new in (("push_to='ada/maths'", "hub.push_to"), ("push_timeout_s=60", "hub.timeout_s")):
        with pytest.raises(ConfigError, match=f"a former key; rename it to {new}"):
            compose(["my.toml"], [f"export.{key}"], catalogue)
