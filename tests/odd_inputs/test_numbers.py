# SPDX-License-Identifier: Apache-2.0
"""Every number of the configuration, in the core's tables and in all components' options, has finite bounds."""

import json
import math
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from relax_core.api import ConfigError
from relax_core.api.component import BY_TABLE
from relax_core.config.annotation import annotation_of, models_in, types_in
from relax_core.config.compose import resolve
from relax_core.config.layers import parse_override, read_layers
from relax_core.config.run_config import COMPONENT_TABLES, Core
from relax_core.registry.catalogue import Catalogue

DATA = tomllib.loads(Path(__file__).with_name("numbers.toml").read_text())


def components():
    """Yield (kind and name, options model) of every installed component whose packages are installed."""
    catalogue = Catalogue.load()
    for kind in BY_TABLE.values():
        for name in catalogue.names(kind.name):
            try:
                yield f"{kind.name}:{name}", catalogue.target(kind.name, name).options_model()
            except Exception:  # a package of the component is missing
                continue


def numbers(prefix, model, seen):
    """Yield (key, model, field, types) of each field with numbers."""
    for name, field in model.model_fields.items():
        annotation = annotation_of(field)
        for inner in models_in(annotation):
            if (inner, name) not in seen:
                seen.add((inner, name))
                yield from numbers(f"{prefix}.{name}", inner, seen)
        kinds = {kind for kind in types_in(annotation) if kind in (int, float)}
        if kinds:
            yield f"{prefix}.{name}", model, name, kinds


def accepts(model, name, value):
    """Return True if the field accepts a number alone, or in a pair or a table a number that is not finite."""
    forms = (value, [value, value], {"a": value}) if not math.isfinite(value) else (value,)
    for form in forms:
        try:
            model.model_validate_json(json.dumps({name: form}), strict=True)
            return True
        except ValidationError as error:
            if not any(detail["loc"][0] == name for detail in error.errors()):
                return True
    return False


def test_every_number_of_the_schema_refuses_what_no_run_can_use():
    seen, wrong, count = set(), [], 0
    tables = [("", Core), *((table, keys) for table, (keys, _) in COMPONENT_TABLES.items()), *components()]
    for prefix, model in tables:
        for key, owner, name, kinds in numbers(prefix, model, seen):
            count += 1
            values = (
                [float(text) for text in DATA["floats"]] if float in kinds else [int(text) for text in DATA["ints"]]
            )
            if name in DATA["signed"]:
                values = [value for value in values if value > 0]
            values += [int(most) for unit, most in DATA["units"].items() if name.endswith(unit)]
            wrong += [f"{key} = {value}" for value in values if accepts(owner, name, value)]
    assert count > 200 and not wrong


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in DATA["refused"].items() for value in values]
)
def test_a_number_out_of_bounds_is_refused_by_its_key(key, value):
    base = {"model": {"path": "m"}, "data": {"train": "t"}, "rewards": [{"name": "exact"}]}
    tree, _ = read_layers([base], [f"{key}={value}"], Path.cwd())
    with pytest.raises(ConfigError) as caught:
        resolve(tree, CATALOGUE)
    assert caught.value.field.partition(" ")[0].startswith(key)


@pytest.mark.parametrize("digits", ["9" * 5000, "0x" + "f" * 5000])
def test_a_number_of_too_many_digits_is_refused_with_its_place(tmp_path, digits):
    file = tmp_path / "c.toml"
    file.write_text(f"[rollout]\nmax_turns = {digits}\n")
    with pytest.raises(ConfigError, match="a whole number of more than 4300 digits: line 2 column"):
        read_layers([file], [], tmp_path)
    assert parse_override(f"rollout.max_turns={digits}") == (("rollout", "max_turns"), digits)


CATALOGUE = Catalogue.load()
