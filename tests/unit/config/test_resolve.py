# SPDX-License-Identifier: Apache-2.0
"""Resolving: round trips, defaults, unknown keys, secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st
from pydantic import ValidationError, model_validator

from relax_core.api.errors import ConfigError, PluginError
from relax_core.api.options import Options, Secret
from relax_core.config.compose import compose, parse_config
from relax_core.config.layers import read_layer
from relax_core.config.problems import ConfigProblems, shown, validation_errors
from relax_core.config.run_config import RunConfig, core_tables, table_keys, to_toml, top_level_keys
from relax_core.registry.catalogue import Catalogue

words = st.text(max_size=6)
numbers = st.floats(allow_nan=False, allow_infinity=False)
bounded = st.floats(-1e6, 1e6).filter(lambda value: not 0 < abs(value) < 1e-6)
values = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**60), 2**60), numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(words, inner, max_size=2)),
    max_leaves=5,
)
configurations = st.fixed_dictionaries(
    {"model": st.fixed_dictionaries({"path": st.just("/m"), "chat_template_kwargs": st.dictionaries(words, values)})},
    optional={
        "seed": st.integers(-5, 5),
        "placement": st.sampled_from(["colocate", "hybrid", "async", {"mode": "hybrid", "rollout": {"engines": 3}}]),
        "max_staleness": st.sampled_from([0, 2, "unbounded"]),
        "plugins": st.just(["/p/one.py"]),
        "run": st.fixed_dictionaries({"notes": words, "env": st.just({"API_KEY": "env:KEY", "LEVEL": "info"})}),
        "optimizer": st.fixed_dictionaries({"lr": st.floats(1e-12, 1.0), "betas": st.just([0.5, 0.75])}),
        "rewards": st.just(["maths", {"name": "judge", "weight": 0.5, "key": "env:K", "only": "level=1"}]),
        "sinks": st.just(["tensorboard"]),
        "engine": st.fixed_dictionaries(
            {"name": st.just("vllm"), "batch": st.integers(-(2**60), 2**60), "python": st.just("/v/python")}
        ),
        "algorithm": st.fixed_dictionaries({"clip_high": bounded}),
        "eval": st.fixed_dictionaries(
            {"sets": st.lists(st.just({"name": "a", "path": "/a", "columns": {"prompt": "q"}}), max_size=2)}
        ),
    },
)


def config_of(catalogue: Catalogue, data: dict[str, Any]) -> RunConfig:
    return parse_config({"data": {"train": "/t.jsonl"}, **data}, catalogue)


@settings(max_examples=30, deadline=None)
@given(data=configurations)
def test_a_dumped_or_written_configuration_parses_to_the_same(catalogue: Catalogue, data: dict[str, Any]) -> None:
    config = config_of(catalogue, data)
    dumped = config.dump()
    again = parse_config(dumped, catalogue)
    assert again == config and again.dump() == dumped
    assert parse_config(json.loads(json.dumps(dumped)), catalogue) == config
    written = to_toml(dumped, lambda key: f"from {key!r}"[:20].replace("\n", ""))
    assert parse_config(tomllib.loads(written), catalogue) == config


@settings(max_examples=50, deadline=None)
@given(table=st.sampled_from(["", *table_keys()]), key=st.text("abcdefgh_", min_size=1, max_size=9))
def test_unknown_keys_are_always_refused_with_a_hint(catalogue: Catalogue, table: str, key: str) -> None:
    known = {"": [*top_level_keys(), *table_keys()], **table_keys()}
    assume(key not in known[table] and key not in ("batch", "cache"))
    data: dict[str, Any] = {"model": {"path": "/m"}}
    chosen = {"filters": None, "media": None, "autoscale": None, "rewards": "maths", "sinks": "tensorboard",
              "environments": "single-turn"}  # fmt: skip
    if table in chosen and not chosen[table]:
        return
    if table == "":
        data[key] = 1
    elif table in ("rewards", "sinks", "environments"):
        data[table] = [{"name": chosen[table], key: 1}]
    elif table == "teachers":
        data[table] = [{"path": "/t", key: 1}]
    elif table == "engines":
        data[table] = [{"name": "judge", "path": "/t", key: 1}]
    else:
        data[table] = {**data.get(table, {}), key: 1, **({"train": "/t"} if table == "data" else {})}
    with pytest.raises(ConfigError) as caught:
        config_of(catalogue, data)
    assert key in caught.value.field and "unknown key" in str(caught.value.got)
    assert (
        "did you mean" in caught.value.fix
        or "known names are" in caught.value.fix
        or "is a key of" in caught.value.fix
        or "no names are known" in caught.value.fix
    )


def test_keys_of_the_sandbox_need_no_name(catalogue: Catalogue) -> None:
    config = config_of(catalogue, {"model": {"path": "/m"}, "sandbox": {"boxes": 3}})
    assert config.sandbox is not None and (config.sandbox.name, config.sandbox.boxes) == ("bubblewrap", 3)
    assert config_of(catalogue, {"model": {"path": "/m"}}).sandbox is None
    other = config_of(catalogue, {"model": {"path": "/m"}, "sandbox": "process"}).sandbox
    assert other is not None and other.name == "process"


def test_all_problems_are_reported_at_once_with_their_places(folder: Path, catalogue: Catalogue) -> None:
    (folder / "bad.toml").write_text(
        "steps = 0\nrolout = 1\nmax_new_tokens = 3\n[rollout]\ngroup_siz = 4\n[algorithm]\nclip_hihg = 1.0\n"
        '[[rewards]]\nname = "mahts"\n'
    )
    with pytest.raises(ConfigProblems) as caught:
        compose(["my.toml", "bad.toml"], ["trainer.batch=many"], catalogue)
    text = str(caught.value)
    assert len(caught.value.errors) == 6 + 1
    for place in (
        "steps (bad.toml:1)",
        "rolout (bad.toml:2)",
        "rollout.group_siz (bad.toml:5)",
        "algorithm.clip_hihg (bad.toml:7)",
        "rewards.0.name (bad.toml:9)",
        "trainer.batch (command line)",
    ):
        assert place in text
    for hint in ("'rollout'", "'group_size'", "'clip_high'", "'maths'", "max_new_tokens is a key of [rollout]"):
        assert hint in text
    assert "[model]" in text and "[[rewards]]" in text


def test_a_required_key_that_is_missing_is_named(catalogue: Catalogue) -> None:
    with pytest.raises(ConfigProblems, match=r"(?s)model: .*data: "):
        parse_config({}, catalogue)


def test_a_number_for_a_variable_is_refused_by_its_own_key(catalogue: Catalogue) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(catalogue, {"model": {"path": "/m"}, "run": {"env": {"A": 1}}})
    assert caught.value.field == "run.env.A (python)"


def test_a_value_that_no_file_can_hold_is_refused(catalogue: Catalogue) -> None:
    with pytest.raises(ConfigError, match="of type function"):
        config_of(catalogue, {"model": {"path": "/m"}, "steps": lambda: 1})


def test_a_plugin_whose_options_model_fails_is_named(with_faults: Catalogue) -> None:
    with pytest.raises(PluginError, match=r"sink 'bad'.*ZeroDivisionError"):
        config_of(with_faults, {"model": {"path": "/m"}, "sinks": [{"name": "bad", "size": 0}]})


def test_an_option_named_like_a_key_of_the_core_is_the_plugins_fault(with_faults: Catalogue) -> None:
    with pytest.raises(PluginError, match="weight have names of core keys"):
        config_of(with_faults, {"model": {"path": "/m"}, "rewards": ["greedy"]})


def test_a_broken_plugin_does_not_hide_mistakes_of_the_configuration(with_faults: Catalogue) -> None:
    with pytest.raises(ConfigError, match="sed"):
        config_of(with_faults, {"model": {"path": "/m"}, "rewards": ["greedy"], "sed": 1})


@pytest.mark.parametrize(
    ("placement", "deterministic", "staleness"),
    [("colocate", False, 0), ("hybrid", False, 1), ("async", False, 1), ("async", True, 0)],
)
def test_default_staleness_follows_the_placement(
    catalogue: Catalogue, placement: str, deterministic: bool, staleness: int
) -> None:
    config = config_of(catalogue, {"model": {"path": "/m"}, "placement": placement, "deterministic": deterministic})
    assert config.max_staleness == config.staleness == staleness


def test_the_bus_follows_the_runner(catalogue: Catalogue) -> None:
    names = [config_of(catalogue, {"model": {"path": "/m"}, "run": {"runner": r}}).bus.name for r in ("local", "ray")]
    assert names == ["in-process", "ray"]


def test_a_literal_secret_is_refused_and_never_printed(catalogue: Catalogue) -> None:
    for data in (
        {"placement": {"rollout": {"external": {"token": "hunter2"}}}},
        {"rewards": [{"name": "judge", "key": "hunter2"}]},
        {"run": {"env": {"API_KEY": "hunter2"}}},
    ):
        with pytest.raises(ConfigError) as caught:
            config_of(catalogue, {"model": {"path": "/m"}, **data})
        assert "env:NAME" in str(caught.value)
        assert "hunter2" not in str(caught.value)


class Server(Options):
    token: Secret | None = None
    headers: dict[str, Secret] = {}
    port: int = 80

    @model_validator(mode="after")
    def _refuse(self) -> Server:
        if self.port < 1024:
            raise ValueError("name a port from 1024")
        return self


class Servers(Options):
    servers: tuple[Server, ...] | None = None


def test_a_table_is_shown_without_the_credentials_in_it() -> None:
    table = {"token": "env:HIDDEN", "headers": {"Auth": "file:key"}, "port": 7}
    with pytest.raises(ValidationError) as caught:
        Servers.model_validate({"servers": [table]})
    (problem,) = validation_errors(caught.value, Servers, {}, "environment")
    assert problem.field == "environment.servers.0"
    assert problem.got == "{'token': (hidden), 'headers': {'Auth': (hidden)}, 'port': 7}"
    assert shown({"servers": [{"tokne": "hunter2"}], "other": 7}, Servers) == (
        "{'servers': [{'tokne': (hidden)}], 'other': (hidden)}"
    )


def test_a_secret_stays_a_reference_until_revealed(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIDDEN", "hunter2")
    file = tmp_path / "key"
    file.write_text("swordfish\n")
    data = {
        "placement": {"rollout": {"external": {"token": "env:HIDDEN"}}},
        "run": {"env": {"MY_TOKEN": f"file:{file}", "A": "b"}},
    }
    config = config_of(catalogue, {"model": {"path": "/m"}, **data})
    assert "hunter2" not in repr(config) + to_toml(config.dump()) + json.dumps(config.dump())
    external = config.placement.rollout.external
    assert external.token is not None and external.token.reveal() == "hunter2"
    assert config.run.revealed_env() == {"MY_TOKEN": "swordfish", "A": "b"}
    with pytest.raises(ConfigError, match="NOT_SET"):
        Secret("env:NOT_SET").reveal()
    with pytest.raises(ConfigError, match="absent"):
        Secret(f"file:{tmp_path}/absent").reveal()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, said in (("pipe", "got not a regular file"), ("bytes", "got bytes that are not UTF-8")):
        with pytest.raises(ConfigError, match=said):
            Secret(f"file:{tmp_path}/{name}").reveal()
    with pytest.raises(ConfigError, match="pipe: got not a regular file; name a readable TOML file"):
        read_layer(tmp_path / "pipe", tmp_path)


def test_hosts_of_media_are_names_and_their_folders_are_relative_to_the_file(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    file = tmp_path / "a.toml"
    text = '[model]\npath = "/m"\n[data]\ntrain = "/t"\n[data.media]\nallowed_folders = ["pictures"]\nallowed_hosts = [{}]\n'
    file.write_text(text.format('"a.example.org", "*.b.example", "10.0.0.0/8", "::1"'))
    config = compose([file], [], checked=False).config
    assert config.data.media.allowed_folders == (tmp_path / "pictures",)
    again = tomllib.loads(to_toml(config.dump()))["data"]["media"]
    assert again["allowed_hosts"] == ["a.example.org", "*.b.example", "10.0.0.0/8", "::1"]
    for wrong in ("*", "https://a.example", "a.example/x", "", "a b", "a.example:80", "10.0.0.0/99"):
        file.write_text(text.format(json.dumps(wrong)))
        with pytest.raises(ConfigError, match=r"data\.media\.allowed_hosts.*is not a host; write a name like"):
            compose([file], [], checked=False)


def test_every_core_key_is_documented() -> None:
    undocumented = [
        f"{table}.{name}"
        for table, model in {"": RunConfig, **core_tables()}.items()
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert undocumented == []


LIGHT = """
import sys, relax_core.cli.main, relax_core.config
heavy = {"torch", "ray", "pydantic", "PIL", "jinja2", "zstandard", "psutil", "structlog"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from relax_core.config import *
assert "pydantic" in sys.modules and not {"torch", "ray"} & set(sys.modules)
"""


def test_registering_the_verbs_imports_nothing_heavy_and_reading_options_neither_torch_nor_ray() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=600)
