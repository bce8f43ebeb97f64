# SPDX-License-Identifier: Apache-2.0
"""A rendering depends on its messages alone: every process and every resume of a run shows the date of the run's start."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import pytest
from relax_plugin_chat import template_sandbox

from relax_core.api.errors import ConfigError
from relax_core.api.task import Message
from relax_core.config.tables import EngineTable
from relax_core.control.prepare import Prepared, prepare, prepare_resume
from relax_core.engines.factories import auxiliary_spec
from tests.chat.models import SHAPES, open_family, write_model
from tests.odd_inputs.test_data_checks import configured, folder

__all__ = ["folder"]
DATED = "{{ strftime_now('%d %B %Y, %H') }}{% for m in messages %}{{ m.content }}{% endfor %}"


def dates(prepared: Prepared) -> set[str]:
    """Return the dates that the processes of a run get for its policy."""
    prepared.directory.close()
    return {stage.launch.config["model"]["chat_template_date"] for stage in prepared.stages}


def test_every_start_of_a_run_shows_the_date_of_its_first_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare([configured(folder)], [], run_dir=folder / "run")
    (began,) = dates(prepared)
    file = folder / "run/provenance.json"
    assert json.loads(file.read_text())["began"] == began
    recorded = json.loads(file.read_text())
    file.write_text(json.dumps({**recorded, "began": "2026-01-31T23:59:59"}))
    assert dates(prepare_resume(folder / "run", [], unfinished=True)) == {"2026-01-31T23:59:59"}
    del recorded["began"]  # a run directory of an earlier version
    file.write_text(json.dumps(recorded))
    os.utime(file, (1.7e9, 1.7e9))
    created = datetime.fromtimestamp(1.7e9).isoformat()
    assert dates(prepare_resume(folder / "run", [], unfinished=True)) == {created}
    fixed = prepare([folder / "run.toml"], ['model.chat_template_date="2026-02-01"'], run_dir=folder / "fixed")
    assert dates(fixed) == {"2026-02-01"}
    assert dates(prepare_resume(folder / "fixed", [], unfinished=True)) == {"2026-02-01"}
    table = EngineTable(name="judge", path=folder / "model")
    assert auxiliary_spec(fixed.config, table).model["chat_template_date"] == "2026-02-01"


def test_a_template_shows_the_date_that_it_is_given(tmp_path: Path) -> None:
    write_model(tmp_path, SHAPES["one-line"])
    for date, shown in (("2026-01-31", "31 January 2026, 00"), ("2026-02-01T12:30:00", "01 February 2026, 12")):
        family = open_family(tmp_path, chat_template=DATED, chat_template_date=date)
        assert family.text((Message("user", "q"),)) == f"{shown}q"
    with pytest.raises(ConfigError, match="model.chat_template_date.*'soon'"):
        open_family(tmp_path, chat_template=DATED, chat_template_date="soon")


@pytest.mark.parametrize("text", [
    "{{ ['a', 'b'] | random }}", "{{ messages[0].items }}", "{{ messages | map(attribute='role') }}", "{{ raise_exception }}",
    "{{ 'a' ~ messages[0].items }}", "{{ strftime_now }}",
])  # fmt: skip
def test_text_that_would_differ_in_each_process_is_refused(text: str, tmp_path: Path) -> None:
    write_model(tmp_path, SHAPES["one-line"])
    with pytest.raises(ConfigError, match=r"random|differ in each process"):
        open_family(tmp_path, chat_template="{{ messages[0].content }}" + text).text((Message("user", "q"),))


def test_the_difference_of_keys_keeps_their_order() -> None:
    names = [f"n{number}" for number in range(40)]
    fields = {"known": dict.fromkeys(names)}
    text = "{{ (known.keys() - ['n3'])|join(' ') }}{{ known.keys() - ['n3'] - known.keys() }}"
    made = template_sandbox.rendered(template_sandbox.compiled(text, {}), fields)
    assert made == " ".join(name for name in names if name != "n3") + "dict_keys([])"
