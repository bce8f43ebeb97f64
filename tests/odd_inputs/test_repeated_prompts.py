# SPDX-License-Identifier: Apache-2.0
"""The prompt reaches the model once, also if a completion repeats it; a completion to another prompt is refused."""

import json
import tomllib
from pathlib import Path

import pytest

from relax_core.api import ConfigError
from relax_core.api.algorithm import Source
from relax_core.data.dataset import Dataset, DatasetSettings
from relax_core.data.task_files import JsonLines
from tests.chat.tool_templates import open_family
from tests.odd_inputs.test_message_rows import TEMPLATES

ROWS = tomllib.loads(Path(__file__).with_name("repeated_prompts.toml").read_text())["rows"]


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return open_family(tmp_path_factory.mktemp("plain"), TEMPLATES["plain"], "<|im_end|>", tool_calls="hermes")


def dataset(folder, family, *rows, system_prompt=""):
    file, source = folder / "rows.jsonl", JsonLines()
    file.write_text("\n".join(map(json.dumps, rows)))
    source.open(str(file), {})
    form = Source.PAIRS if "chosen" in rows[0] else Source.DATASET
    return Dataset(source, family, form, DatasetSettings(system_prompt, 999))


@pytest.mark.parametrize("entry", ROWS, ids=[row["name"] for row in ROWS])
def test_a_prompt_is_rendered_once(tmp_path, family, entry):
    if "refused" in entry:
        with pytest.raises(ConfigError) as caught:
            dataset(tmp_path, family, entry["row"])
        assert entry["refused"] in str(caught.value) and "rows.jsonl:1" in str(caught.value)
    elif "same" in entry:
        rows = dataset(tmp_path, family, entry["row"], entry["same"])
        assert rows.examples(0) == rows.examples(1) and rows.content(0).key == rows.content(1).key
        assert len(set(rows.examples(0))) == len(rows.examples(0))
    else:
        (example,) = dataset(tmp_path, family, entry["row"]).examples(0)
        trained = [token for token, mask in zip(example.tokens, example.mask, strict=True) if mask]
        assert family.decode(trained, skip_special=False) == entry["trained"]
        assert entry["shows"] in family.decode(example.tokens, skip_special=False)


def test_the_system_prompt_of_the_run_stands_before_a_prompt_of_text_that_conversations_repeat(tmp_path, family):
    said = {name: [{"role": "user", "content": "q"}, {"role": "assistant", "content": name}] for name in ("a", "b")}
    row = {"prompt": "q", "chosen": said["a"], "rejected": said["b"]}
    first, _ = dataset(tmp_path, family, row, system_prompt="s").examples(0)
    assert family.decode(first.tokens, skip_special=False).count(":") == 3
