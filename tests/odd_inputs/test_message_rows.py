# SPDX-License-Identifier: Apache-2.0
"""Rows with tools, thoughts, names and calls: every field is shown or trained, or the row is refused by its field."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from relax_plugin_chat.chat import ChatFamily

from relax_core.api.algorithm import Source
from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError
from relax_core.data.dataset import Dataset, DatasetSettings
from relax_core.data.task_files import Files, JsonLines
from relax_core.data.tasks import TaskSet, TaskSettings
from tests.chat.tool_templates import HERMES, open_family

ROWS = tomllib.loads((Path(__file__).parent / "message_rows.toml").read_text())["rows"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:TURN{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:OPENING{% endif %}"
)
CONTENT = "{{ m.content }}"
STRIPPED = (
    "{{ m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
)


def chatml(turn: str, opening: str = "") -> str:
    return CHATML.replace("TURN", turn).replace("OPENING", opening)


TEMPLATES = {
    "hermes": HERMES,
    "plain": chatml(CONTENT),
    "fields": (
        "{% for m in messages %}{{ m.role }}{% if m.role != 'tool' and m.name %} {{ m.name }}{% endif %}"
        "{% if m.role == 'tool' %}[{{ m.tool_call_id }}]{% endif %}:"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }}{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>"
        "{% endfor %}"
    ),
    "calls-only": chatml(
        "{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function | tojson }}</tool_call>"
        "{% else %}{{ m.content }}{% endif %}"
    ),
    "opens": chatml(STRIPPED, "<think>\n"),
    "opens-brackets": chatml(CONTENT.replace("m.content", "m.content.split('[/THINK]')[-1]"), "[THINK]"),
    "opens-always": chatml("{% if m.role == 'assistant' %}<think>\n{% endif %}" + CONTENT, "<think>\n"),
    "closes": chatml(CONTENT, "<think>\n\n</think>\n\n"),
    "strips": chatml(STRIPPED),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatFamily]:
    return {
        name: open_family(tmp_path_factory.mktemp(name), text, "<|im_end|>", tool_calls="hermes")
        for name, text in TEMPLATES.items()
    }


@pytest.mark.parametrize("entry", ROWS, ids=[row["name"] for row in ROWS])
def test_no_field_of_a_row_vanishes(tmp_path: Path, families: dict[str, ChatFamily], entry: dict[str, Any]) -> None:
    family, file, source = families[entry["template"]], tmp_path / "rows.jsonl", JsonLines()
    file.write_text(entry["row"])
    tools = [Tool(name) for name in entry.get("environment_tools", ())]

    def read() -> tuple[str, str]:
        """Return the shown text and the trained text."""
        source.open(str(file), {})
        if not entry.get("supervised"):
            rows = TaskSet(source, family, TaskSettings(max_prompt_tokens=4096, tools=tools, media=["image"]))
            return family.decode(rows.prompt(0).tokens, skip_special=False), ""
        form = Source.PAIRS if entry.get("pairs") else Source.DATASET
        example = Dataset(source, family, form, DatasetSettings(max_row_tokens=4096)).examples(0)[0]
        trained = [token for token, mask in zip(example.tokens, example.mask, strict=True) if mask]
        return family.decode(example.tokens, skip_special=False), family.decode(trained, skip_special=False)

    if "refused" in entry:
        with pytest.raises(ConfigError) as caught:
            read()
        assert entry["refused"] in str(caught.value) and "rows.jsonl:1" in str(caught.value)
        return
    shown, trained = read()
    assert all(text in shown for text in entry.get("shows", ()))
    assert not any(text in shown for text in entry.get("hides", ()))
    assert entry.get("trained", "") in trained
    if trained and "<tool_call>" not in trained:
        assert trained == entry["trained"]


def test_a_table_trains_the_same_calls_as_the_lines_it_was_made_of(
    tmp_path: Path, families: dict[str, ChatFamily]
) -> None:
    """A table gives every call the arguments of all calls, and every tool the parameters of all tools."""
    calls = [{"function": {"name": name, "arguments": {key: 1}}} for name, key in (("f", "a"), ("g", "b"))]
    schemas = [{"type": "object", "properties": {key: {"type": "string"}}} for key in "ab"]
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in zip("fg", schemas, strict=True)
    ]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    row = {"messages": messages, "tools": tools}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    examples = []
    for name in ("rows.parquet", "rows.jsonl"):
        source = Files()
        source.open(str(tmp_path / name), {})
        examples += Dataset(source, families["hermes"], Source.DATASET).examples(0)
    assert examples[0] == examples[1]
