# SPDX-License-Identifier: Apache-2.0
"""An export holds the tokenizer and the template that the run trained with."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from relax_plugin_chat.chat import ChatFamily
from relax_plugin_megatron.folder import exported_config, write_folder as write_folder_of_tensors
from relax_plugin_torch.model import export_folder, load_model, own_tensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax_core.api import Message
from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError
from relax_core.testing.trainer import tiny_model
from relax_core.trainer_kit.tokenizer_files import TokenizerFiles

EXPORTS = tomllib.loads((Path(__file__).parent / "exports.toml").read_text())["exports"]
OWN = "\n  own:{{ messages[0].content }}{{ enable_thinking }}{{ words }}{{ n }}{{ all }}"
ASKED = (Message("user", "q"),)
TOOLS = (Tool("search"),)


def write_folder(folder: Path, own: str, template: str, extra: str = "") -> Path:
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: place for place, one in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", *([extra] if extra else [])])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"eos_token": "<|end|>"}
    if own in ("file", "files"):
        (folder / "chat_template.jinja").write_text(template)
    if own == "files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools" + template)
    elif own == "settings":
        settings["chat_template"] = template
    elif own == "list":
        settings["chat_template"] = [
            {"name": "default", "template": template},
            {"name": "tool_use", "template": "tools" + template},
        ]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def opened(table: dict[str, Any]) -> ChatFamily:
    family = ChatFamily()
    family.open(table)
    return family


@pytest.mark.parametrize("entry", EXPORTS, ids=[one["name"] for one in EXPORTS])
def test_an_export_renders_as_the_run_did(tmp_path: Path, entry: dict[str, Any]) -> None:
    table: dict[str, Any] = {"path": str(write_folder(tmp_path / "model", entry["own"], OWN))}
    if entry.get("tokenizer"):
        table["tokenizer"] = str(write_folder(tmp_path / "tokenizer", "file", "tokenizer:" + OWN, "<extra>"))
    if template := entry.get("chat_template"):
        table["chat_template"] = template
        if template.startswith("file:"):
            (tmp_path / "own.jinja").write_text(template.removeprefix("file:"))
            table["chat_template"] = str(tmp_path / "own.jinja")
    table["chat_template_kwargs"] = entry.get("chat_template_kwargs", {})
    files = TokenizerFiles.of(table)
    (tmp_path / "own.jinja").unlink(missing_ok=True)  # read at the start of the run
    run, export = tmp_path / "export", tmp_path / "again"
    for directory in (run, export):
        directory.mkdir()
    files.write(run)
    if "tokenizer" not in entry and "chat_template" not in entry:  # a later stage trains the export with the same table
        TokenizerFiles.of({**table, "path": str(run)}).write(export)
        assert opened({"path": str(export)}).text(ASKED) == opened({"path": str(run)}).text(ASKED)
    if template and template.startswith("file:"):
        table["chat_template"] = template.removeprefix("file:")
    before, after = opened(table), opened({"path": str(run)})
    assert after.start(ASKED) == before.start(ASKED)
    assert after.text(ASKED, TOOLS) == before.text(ASKED, TOOLS)
    library = AutoTokenizer.from_pretrained(run)
    for tools in ((), TOOLS):
        shown = [{"type": "function", "function": {"name": tool.name}} for tool in tools] or None
        messages = [{"role": "user", "content": "q"}]
        assert library.apply_chat_template(messages, tools=shown, tokenize=False) == before.text(ASKED, tools)
    assert after.text(ASKED) == before.text(ASKED)
    assert after.vocab_size == before.vocab_size


def test_a_caller_of_the_export_may_change_the_variables(tmp_path: Path) -> None:
    table = {"path": str(write_folder(tmp_path / "model", "file", OWN)), "chat_template_kwargs": {"n": 1}}
    (tmp_path / "export").mkdir()
    TokenizerFiles.of(table).write(tmp_path / "export")
    assert opened({"path": str(tmp_path / "export"), "chat_template_kwargs": {"n": 2}}).text(ASKED).endswith("own:q2")


def test_a_template_that_can_t_be_read_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template.*gone\.jinja"):
        TokenizerFiles.of({"path": str(tmp_path), "chat_template": str(tmp_path / "gone.jinja")})


def test_an_export_names_no_code_and_loads_without_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_model(model)
    for file in write_folder(tmp_path / "own", "files", OWN).rglob("*.*"):
        target = model / file.relative_to(tmp_path / "own")
        target.parent.mkdir(exist_ok=True)
        shutil.copy(file, target)
    mapped = {"auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    kept = {"config.json": {}, "tokenizer_config.json": {"tokenizer_class": "OwnTokenizer"}}
    kept |= {"preprocessor_config.json": {"size": 4}, "video_preprocessor_config.json": {"fps": 2}}
    kept["processor_config.json"] = {"image_processor": {"size": 4}}
    for name, values in kept.items():
        before = json.loads((model / name).read_text()) if (model / name).exists() else {}
        nested = {key: {**value, **mapped} if isinstance(value, dict) else value for key, value in values.items()}
        (model / name).write_text(json.dumps({**before, **nested, **mapped}))
    trainer = load_model(str(model), "sdpa", torch.device("cpu"))
    settings = json.loads((model / "config.json").read_text())
    torch_export, megatron_export = tmp_path / "torch", tmp_path / "megatron"
    files = TokenizerFiles.of({"path": str(model)})
    for export in (torch_export, megatron_export):
        export.mkdir()
    export_folder(trainer, trainer.state_dict(), files, torch_export, torch.float32)
    write_folder_of_tensors(
        own_tensors(trainer).items(), exported_config(settings, "float32", scalar=False), model, files, megatron_export
    )
    for export in (torch_export, megatron_export):
        for name, values in kept.items():
            found = json.loads((export / name).read_text())
            assert "auto_map" not in json.dumps(found) and found.items() >= values.items(), name
        assert (export / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools" + OWN
        loaded = AutoModelForCausalLM.from_pretrained(export)
        assert all(torch.equal(tensor, trainer.state_dict()[name]) for name, tensor in loaded.state_dict().items())
        assert AutoTokenizer.from_pretrained(export).decode([65]) == AutoTokenizer.from_pretrained(model).decode([65])
