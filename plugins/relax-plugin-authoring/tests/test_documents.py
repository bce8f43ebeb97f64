# SPDX-License-Identifier: Apache-2.0
"""What is made from the models: schema, starter file, reference, explanations, and the commands that print them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from relax_plugin_authoring.documentation import explain, reference, schema, starter
from typer.testing import CliRunner

from relax_core.api.errors import ConfigError, PluginError
from relax_core.cli.main import app
from relax_core.config.compose import compose
from relax_core.config.run_config import table_keys, top_level_keys
from relax_core.control import dry_run
from relax_core.registry.catalogue import Catalogue
from tests.ascii_tokenizer import save_ascii_tokenizer


@pytest.fixture
def cli(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The two verbs over the small catalogue; a call gives (stdout, stderr)."""
    monkeypatch.setattr(Catalogue, "load", classmethod(lambda cls, files=(): catalogue))

    def call(*arguments: str) -> tuple[str, str]:
        result = CliRunner().invoke(app, list(arguments), catch_exceptions=True)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout, result.stderr

    return call


def test_the_schema_describes_core_and_components(catalogue: Catalogue) -> None:
    document, notes = schema(catalogue)
    assert notes == []
    assert set(document["properties"]) == {*top_level_keys(), *table_keys()}
    names, *forms = document["properties"]["algorithm"]["anyOf"]
    assert names["enum"] == ["grpo", "on-policy", "sft"]
    assert forms[0]["properties"]["clip_high"]["description"] == "Upper clip."
    assert "weight" in document["properties"]["rewards"]["items"]["anyOf"][1]["properties"]
    refs = set(re.findall(r'"#/\$defs/([^"]+)"', json.dumps(document)))
    assert refs and refs <= set(document["$defs"])


def test_a_component_that_does_not_import_is_left_out_with_a_note(catalogue: Catalogue) -> None:
    class Broken:
        def names(self, kind: str) -> tuple[str, ...]:
            return catalogue.names(kind)

        def find(self, kind: str, name: str) -> Any:
            return catalogue.find(kind, name)

        def tables(self) -> dict[str, Any]:
            return {}

        def target(self, kind: str, name: str) -> Any:
            if name == "vllm":
                raise PluginError("engine 'vllm'", "can't import")
            return catalogue.target(kind, name)

    document, notes = schema(Broken())  # type: ignore[arg-type]
    assert document["properties"]["engine"]["anyOf"][0]["enum"] == ["transformers"]
    assert len(notes) == 1 and "vllm" in notes[0]


STARTED: dict[str, dict[str, Any]] = {
    "model": {"path": "model"}, "data": {"train": "train.jsonl"}, "run": {"name": "new"},
    "rollout": {"max_new_tokens": 16},
}  # fmt: skip


def test_the_full_starter_composes_and_mentions_every_core_key(folder: Path, catalogue: Catalogue) -> None:
    text = starter(STARTED, "maths", full=True)
    (folder / "new.toml").write_text(text)
    config = compose(["new.toml"], [], catalogue).config
    assert config.run.name == "new" and config.data.train == folder / "train.jsonl"
    assert config.dump() == compose(["my.toml"], ["run.name=new"], catalogue).config.dump()
    for key in top_level_keys():
        assert re.search(rf"^(# )?{key} = ", text, re.MULTILINE)
    uncommented = re.sub(r"^# (\w+ = )(?!\.\.\.)", r"\1", text, flags=re.MULTILINE)
    assert compose([tomllib.loads(uncommented)], [], catalogue).config.dump() == config.dump()


def test_the_starter_is_short_and_sets_what_the_full_one_sets() -> None:
    short = starter(STARTED, "maths")
    assert len(short.splitlines()) <= 60
    full = tomllib.loads(starter(STARTED, "maths", full=True))
    assert tomllib.loads(short) == {key: value for key, value in full.items() if value != {}}


def test_the_reference_lists_every_key_of_core_and_components(catalogue: Catalogue) -> None:
    page = reference(catalogue)
    for table, keys in table_keys().items():
        assert f"[{table}]" in page
        assert all(f"`{key}`" in page or f".{key}]" in page for key in keys)
    assert "`clip_high`" in page and "Upper clip." in page and "`[[eval.sets]]`" in page


@pytest.mark.parametrize(
    ("key", "value", "origin", "words"),
    [
        ("rollout.max_new_tokens", 16, "my.toml:7", "Most tokens of one turn"),
        ("rollout.top_p", 1.0, "default", "Nucleus"),
        ("seed", 5, "command line", "data order"),
        ("algorithm.clip_high", 0.2, "default", "Upper clip."),
        ("algorithm.name", "grpo", "default", "Name of the algorithm"),
        ("rewards.0.weight", 1.0, "default", "Factor"),
        ("placement.rollout.engines", 1, "default", "engine processes"),
        ("run.env.LEVEL", "a", "command line", "Environment variables"),
        ("model", None, "my.toml:3", "The policy"),
        ("autoscale", None, "default", "none is chosen"),
    ],
)
def test_a_key_is_explained(folder: Path, catalogue: Catalogue, key: str, value: Any, origin: str, words: str) -> None:
    composed = compose(["my.toml"], ["seed=5", "run.env.LEVEL=a"], catalogue)
    explained = explain(key, composed)
    assert (explained.origin, value is None or explained.value == value) == (origin, True)
    assert words in explained.text


@pytest.mark.parametrize("key", ["rollout.group_siz", "rolout", "algorithm.clip", "rewards.0.wheight", "rollout.a.b"])
def test_an_unused_key_is_not_explained(folder: Path, catalogue: Catalogue, key: str) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        explain(key, compose(["my.toml"], [], catalogue))


def test_show_prints_toml_or_one_json_document_on_stdout(folder: Path, cli: Any) -> None:
    out, err = cli("config", "show", "my.toml", "seed=3")
    assert "seed = 3 # command line" in out and "max_new_tokens = 16 # my.toml:7" in out and err == ""
    document = json.loads(cli("config", "show", "my.toml", "seed=3", "--json")[0])
    assert document == tomllib.loads(out)


def test_show_and_explain_take_the_name_of_a_recipe() -> None:
    shown = CliRunner().invoke(app, ["config", "show", "quickstart", "seed=3"])
    assert shown.exit_code == 0 and "steps = 400 # recipe" in shown.stdout and "seed = 3 # command line" in shown.stdout
    explained = CliRunner().invoke(app, ["config", "explain", "rollout.group_size", "quickstart"])
    assert explained.stdout.startswith("rollout.group_size = 8")
    refused = CliRunner().invoke(app, ["config", "show", "quikstart"])
    assert "or a recipe: did you mean 'quickstart'" in str(refused.exception)


def test_dropped_options_are_named_on_stderr(folder: Path, cli: Any) -> None:
    (folder / "e.toml").write_text("[engine]\nname = 'transformers'\nbatch = 4\n")
    out, err = cli("config", "show", "my.toml", "e.toml", "engine=vllm", "--json")
    assert json.loads(out)["engine"] == {"name": "vllm", "python": "", "batch": 8}
    assert err.count("\n") == 1 and "dropped batch (e.toml:3)" in err


def test_explain_and_schema_print(folder: Path, cli: Any) -> None:
    out, _ = cli("config", "explain", "algorithm.clip_high", "my.toml", "algorithm.clip_high=0.3")
    assert "algorithm.clip_high = 0.3" in out and "command line" in out and "algorithm 'grpo'" in out
    assert "Number of samples of each task." in cli("config", "explain", "rollout.group_size")[0]
    assert json.loads(cli("config", "schema")[0])["title"] == "Relax run configuration"


@pytest.mark.parametrize(("context", "turn", "options"), [(16, 8, []), (128, 64, ["--full"]), (131_072, 1024, [])])
def test_init_writes_a_file_that_the_dry_run_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: int, turn: int, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_ascii_tokenizer(tmp_path / "model")
    Path("model/config.json").write_text(json.dumps({"vocab_size": 127, "max_position_embeddings": context}))
    Path("model/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    rows = ({"prompt": f"{number}+1", "answer": str(number + 1)} for number in range(200))
    Path("train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["init", "new.toml", "--model", "model", "--data", "train.jsonl", *options]
    written = CliRunner().invoke(app, words)
    assert (written.exit_code, written.stdout) == (0, "new.toml\n"), written.output
    monkeypatch.setattr(dry_run, "check_starts", lambda *_: ())
    checked = CliRunner().invoke(app, ["train", "new.toml", "--dry-run"])
    assert checked.exit_code == 0 and "held-out" in checked.output, checked.output
    assert tomllib.loads(Path("new.toml").read_text())["rollout"]["max_new_tokens"] == turn
    for refused, change in (("OUT.toml", {}), ("--data", {1: "b.toml", 5: "absent"})):
        changed = [change.get(at, word) for at, word in enumerate(words)]
        assert refused in str(CliRunner().invoke(app, changed).exception)


def test_init_names_the_line_of_its_file_that_a_run_would_refuse(folder: Path, cli: Any) -> None:
    with pytest.raises(ConfigError, match="rewards.0.name.*new.toml.*'math'.*maths"):
        cli("init", "new.toml", "--model", "model", "--data", "train.jsonl", "--reward", "math")
    assert (folder / "new.toml").exists()
