# SPDX-License-Identifier: Apache-2.0
"""No source of a medium ends `relax data check`: each is an error with file and line, and all rows are read."""

import json
import tomllib
from pathlib import Path

import pytest
from relax_plugin_workbench.data_survey import DataFile, survey

from relax_core.api.family import Rendered
from relax_core.data.task_files import Files, TableSourceOptions
from relax_core.data.tasks import TaskSet, TaskSettings
from relax_core.media.access import SourceAccess
from relax_core.media.source import EmbeddedMedia, cell_value, read_source, restricted, shown, wave

CASES = tomllib.loads(Path(__file__).with_name("sources.toml").read_text())["case"]


class Family:
    """A model family with one token for each medium."""

    placeholders, foreign_tokens = {"image": 5}, {}

    def start(self, prompt, tools=()):
        if "crash" in str(prompt):
            raise ZeroDivisionError("division by zero")
        return Rendered(tuple(5 for message in prompt for part in message.content if part.media))


def surveyed(folder, rows):
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Files(TableSourceOptions())
    source.open(str(path), {})
    access = SourceAccess((), [str(folder)])
    tasks = TaskSet(source, Family(), TaskSettings(media=["image"], access=access), check=False)
    return survey(DataFile(str(path), source, None, Family(), tasks))


def row(source, text="<image>"):
    return {"prompt": [{"role": "user", "content": text}], "image": source}


@pytest.mark.parametrize("case", CASES, ids=[case["source"][:40] for case in CASES])
def test_a_hostile_source_is_an_error_with_its_line(tmp_path, case):
    (tmp_path / "a.png").write_bytes(b"x")
    source = case["source"].replace("HERE", str(tmp_path)).replace("LONG", "a" * 5000)
    result = surveyed(tmp_path, [row("a.png"), row(source), row("data:,x")])
    assert (result.usable, [bad.where.rpartition(":")[2] for bad in result.bad]) == (2, ["2"])
    assert case["reason"] in result.bad[0].reason


def test_an_error_of_the_model_family_is_an_error_of_its_row(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    result = surveyed(tmp_path, [row("a.png", "<image> crash"), row("a.png")])
    assert result.usable == 1 and "ZeroDivisionError: division by zero" in result.bad[0].reason


def test_any_source_has_a_text_for_messages():
    for case in CASES:
        assert isinstance(shown(case["source"]), str)


def test_reading_a_hostile_source_is_a_fault_of_the_medium(tmp_path):
    for case in CASES:
        if not case["source"].startswith(("http", "LONG")):
            with pytest.raises(ValueError), restricted(SourceAccess((), [str(tmp_path)]), 1 << 20):
                read_source(case["source"])
    (tmp_path / "a.jsonl").write_text("{}\n")
    for at in (("a",), ("a", 0), (0,)):
        with pytest.raises(ValueError):
            cell_value(EmbeddedMedia(str(tmp_path / "a.jsonl"), 0, at))


@pytest.mark.parametrize("rate", [2e9, 1 << 30])
def test_a_sound_too_fast_for_a_wav_file_is_refused(rate):
    with pytest.raises(ValueError, match="WAV"):
        wave([[0.0] * 64] * 64, rate)
