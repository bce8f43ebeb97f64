# SPDX-License-Identifier: Apache-2.0
"""Layers: what wins, what a change of component drops, where values are from, what paths are relative to."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from relax_core.api.errors import ConfigError
from relax_core.config.compose import compose
from relax_core.config.layers import Leaf, Origin, key_lines, merge, plain, plugins_of, read_layers, with_origins
from relax_core.registry.catalogue import Catalogue

scalars = st.one_of(st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
values = st.dictionaries(st.sampled_from(["a", "b", "c"]), scalars, max_size=3)
# What is a table in one file is a table in all: a key's type is its model's.
tables = st.recursive(
    values,
    lambda inner: st.builds(
        lambda own, nested: {**own, **nested}, values, st.dictionaries(st.sampled_from("TUV"), inner)
    ),
    max_leaves=6,
)
optional = st.dictionaries(st.sampled_from(["o", "p"]), st.integers(), max_size=2)
engine_layers = st.lists(
    st.tuples(st.sampled_from([None, "x", "y"]), optional).map(
        lambda drawn: {**drawn[1], **({"name": drawn[0]} if drawn[0] else {})}
    ),
    min_size=1,
    max_size=5,
)


def merged(*layers: dict) -> dict:
    tree = {}
    for layer in layers:
        tree = merge(tree, with_origins(layer, lambda path: Origin("test")), [])
    return plain(tree)


@settings(max_examples=50, deadline=None)
@given(tables, tables, tables)
def test_merging_tables_is_associative(low: dict, middle: dict, high: dict) -> None:
    assert merged(merged(low, middle), high) == merged(low, merged(middle, high))


@settings(max_examples=50, deadline=None)
@given(tables)
def test_an_empty_layer_changes_nothing(table: dict) -> None:
    assert merged(table, {}) == table == merged({}, table)


@settings(max_examples=50, deadline=None)
@given(engine_layers)
def test_options_survive_exactly_since_the_last_change_of_name(layers: list[dict]) -> None:
    name, options = None, {}
    for layer in layers:
        if name is not None and layer.get("name", name) != name:
            options = {}
        name = layer.get("name", name)
        options |= {key: value for key, value in layer.items() if key != "name"}
    expected = {**options, **({"name": name} if name else {})}
    assert merged(*[{"engine": layer} for layer in layers]) == {"engine": expected}


def test_files_win_left_to_right_and_overrides_win_over_files(folder: Path, catalogue: Catalogue) -> None:
    (folder / "b.toml").write_text("seed = 2\nsteps = 7\n[rollout]\ngroup_size = 3\n")
    composed = compose(
        ["my.toml", "b.toml", {"steps": 8}], ["seed=3"], catalogue, {"seed": 1, "steps": 9, "eval": {"every": 5}}
    )
    config = composed.config
    assert (config.seed, config.steps, config.rollout.group_size, config.eval.every) == (3, 8, 3, 5)
    where = {key: str(composed.origin_of(key)) for key in ("seed", "steps", "rollout.group_size", "rollout.top_p")}
    assert where == {
        "seed": "command line",
        "steps": "python",
        "rollout.group_size": "b.toml:4",
        "rollout.top_p": "default",
    }


def test_a_new_name_drops_the_options_of_lower_layers_and_says_so(folder: Path, catalogue: Catalogue) -> None:
    (folder / "engine.toml").write_text('[engine]\nname = "transformers"\npython = "venv/bin/python"\nbatch = 4\n')
    composed = compose(["my.toml", "engine.toml"], ["engine.batch=2", "engine=vllm"], catalogue, on_disk=False)
    assert composed.config.engine.chosen.options == {"batch": 2}
    assert composed.config.engine.python == ""
    (notice,) = composed.notices
    assert "engine is vllm (command line)" in notice and "batch (engine.toml:4)" in notice
    assert "python (engine.toml:3)" in notice


def test_a_reward_keeps_its_weight_when_another_one_is_named(folder: Path, catalogue: Catalogue) -> None:
    (folder / "r.toml").write_text('[[rewards]]\nname = "judge"\nurl = "http://x"\nweight = 2.0\n')
    composed = compose(["my.toml", "r.toml"], ["rewards.0.name=maths"], catalogue)
    (reward,) = composed.config.rewards
    assert (reward.name, reward.weight, reward.chosen.options) == ("maths", 2.0, {})


def test_overrides_index_arrays(folder: Path, catalogue: Catalogue) -> None:
    overrides = ["rewards.0.weight=2", "rewards.1=judge", "optimizer.betas=[0.8, 0.9]", "optimizer.betas.1=0.95"]
    config = compose(["my.toml"], overrides, catalogue).config
    assert [(r.name, r.weight) for r in config.rewards] == [("maths", 2.0), ("judge", 1.0)]
    assert config.optimizer.betas == (0.8, 0.95)


@pytest.mark.parametrize(
    "override", ["rewards.7.weight=2", "steps.x=1", "run.tags.0=a", "steps", "=3", "a..b=1", "rewards.x.weight=1"]
)
def test_an_override_that_leads_nowhere_is_refused(folder: Path, catalogue: Catalogue, override: str) -> None:
    with pytest.raises(ConfigError):
        compose(["my.toml"], [override], catalogue)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("1e-3", 0.001),
        ("[1, 2]", [1, 2]),
        ("a b", "a b"),
        ('"7"', "7"),
        ("1\nx = 2", "1\nx = 2"),
        ("", ""),
    ],
)
def test_values_are_toml_else_text(text: str, value: object) -> None:
    from relax_core.config.layers import parse_override

    assert parse_override(f"run.notes={text}") == (("run", "notes"), value)


def test_paths_are_relative_to_their_configuration_file(folder: Path, catalogue: Catalogue) -> None:
    other = folder / "cluster"
    other.mkdir()
    (other / "c.toml").write_text('plugins = ["mine.py"]\n[engine]\npython = "venv/python"\ncache = "kernels"\n')
    composed = compose(
        ["my.toml", other / "c.toml"],
        ["data.train=train.jsonl", 'run.env.TOKEN="file:key"'],
        catalogue,
        on_disk=False,
    )
    config = composed.config
    assert config.model.path == folder / "model"
    assert config.data.train == folder / "train.jsonl"
    assert config.engine.python == str(other / "venv/python")
    assert config.engine.chosen.options["cache"] == str(other / "kernels")
    assert config.plugins == (other / "mine.py",)
    assert str(config.run.env["TOKEN"]) == f"file:{folder / 'key'}"
    assert plugins_of(read_layers(["my.toml", other / "c.toml"], (), folder)[0]) == (str(other / "mine.py"),)


def test_a_template_written_out_is_not_a_path(folder: Path, catalogue: Catalogue) -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = compose(["my.toml", {"model": {"chat_template": text}}], [], catalogue).config
    assert config.model.chat_template == text
    config = compose(["my.toml"], ["model.chat_template=chat.jinja"], catalogue).config
    assert config.dump()["model"]["chat_template"] == str(folder / "chat.jinja")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("solver.py:solve", "{here}/solver.py:solve"),
        ("agents/solver.py:solve", "{here}/agents/solver.py:solve"),
        ("solver:solve", "solver:solve"),
        ("my_package.solver:solve", "my_package.solver:solve"),
    ],
)
def test_code_in_a_file_has_a_path_and_code_in_a_module_has_none(tmp_path: Path, written: str, read: str) -> None:
    assert plain(Leaf(written, Origin("my.toml", 1, tmp_path)), Path | str) == read.format(here=tmp_path)


def test_bare_strings_are_tables_with_only_a_name(folder: Path, catalogue: Catalogue) -> None:
    config = compose(["my.toml"], ["placement=async", "engine=vllm", "rewards=judge"], catalogue).config
    assert (config.placement.mode, config.engine.name, config.rewards[0].name) == ("async", "vllm", "judge")


def test_lines_are_found_through_headers_arrays_and_long_values() -> None:
    text = '# c\na = """\nx = 1\n"""\n[t]\nb = [\n 1,\n]\nc.d = 2 # x\n\n[[r]]\nn = 1\n[r.s]\nm = 3\n[[r]]\nn = 2\n'
    found = key_lines(text)
    expected = {("a",): 2, ("t", "b"): 6, ("t", "c", "d"): 9, ("r", "0", "n"): 12, ("r", "0", "s", "m"): 14}
    assert {key: found[key] for key in expected} == expected
    assert found["r", "1", "n"] == 16


def test_text_that_is_not_toml_names_file_and_line(folder: Path, catalogue: Catalogue) -> None:
    (folder / "bad.toml").write_text("steps = 1\nseed = = 2\n")
    with pytest.raises(ConfigError, match=r"bad\.toml.*line 2"):
        compose(["bad.toml"], [], catalogue)
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        compose(["absent.toml"], [], catalogue)
