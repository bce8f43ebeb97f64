# SPDX-License-Identifier: Apache-2.0
"""What people see of media: `relax data check --media` and `data show --html` over real files, and a run's report page."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
from relax_plugin_media.host import MediaHost, Previews
from relax_plugin_report.report import render
from relax_plugin_report.transcript import transcript
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from relax_core.api.batch import AttemptId
from relax_core.api.bus import Issue
from relax_core.api.errors import RelaxError
from relax_core.api.modality import browser_type
from relax_core.api.task import Media, Message, Part, Task, ToolCall
from relax_core.api.trajectory import Node, Outcome, Trajectory
from relax_core.api.weights import Version
from relax_core.cli.main import app
from relax_core.rewards.host import ScoredSample
from relax_core.sampling.groups import TOO_LONG, InflightGroup, Selection
from relax_core.sampling.rows import sample_record
from relax_core.views.media_figures import medium_figure
from relax_core.views.run import RunView
from tests.unit.media import clips
from tests.unit.views.conftest import clock, write_run  # noqa: F401

KEY = "ab" * 16
PLACES = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<I>' if p.type == 'image' else '<A>' }}{% endfor %}{% endif %}{% endfor %}"
)


IMAGE, SOUND = clips.picture(0, 40, 24), clips.sound(0, 1.0, 8000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    vocabulary = {"<end>": 0, "<unk>": 1, "<I>": 2, "<A>": 3, **{chr(code): code for code in range(10, 127)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<end>", "<I>", "<A>"])
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    vision = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = {
        "model_type": "qwen3_vl", "eos_token_id": 0, "image_token_id": 2, "audio_token_id": 3, "vision_config": vision,
        "audio_config": {"num_mel_bins": 32, "n_window": 50},
    }  # fmt: skip
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "model/chat_template.jinja").write_text(PLACES)
    for name, content in (("a.png", IMAGE), ("bad.png", b"?"), ("empty.png", b""), ("a.wav", SOUND)):
        (tmp_path / name).write_bytes(content)
    return tmp_path


def relax(*arguments):
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def write(folder: Path, *rows: dict) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_check_decodes_all_media_and_reports_bad_ones_by_row(folder):
    rows = [
        {"prompt": "<image><audio>?", "image": "a.png", "audio": "a.wav"}, {"prompt": "<image>", "image": "bad.png"},
        {"prompt": "<image>", "image": "empty.png"}, {"prompt": "<image>", "image": "gone.png"},
        {"prompt": "<image>", "image": "http://127.0.0.1:9/a.png"}, {"prompt": "<image>", "images": ["a.png"] * 2},
    ]  # fmt: skip
    result = relax("check", write(folder, *rows), "--model", folder / "model", "--media", "--json")
    (report,) = json.loads(result.stdout)["files"]
    assert result.exit_code == 2 and report["usable"] == 1
    told = {int(row["where"].rpartition(":")[2]): row for row in report["bad"]}
    reasons = {
        2: "none of the formats",
        3: "no bytes",
        4: "no such file",
        5: "data.media.allowed_hosts: got image http://127.0.0.1:9/a.png, whose host is not allowed at ",
        6: "1 places for image",
    }
    assert {row: reason in told[row]["reason"] for row, reason in reasons.items()} == dict.fromkeys(reasons, True)
    assert told[2]["field"] == "medium 1 of the prompt" and "remove the row" in told[2]["fix"]
    assert report["media"]["image"]["count"] == report["media"]["audio"]["count"] == 1
    assert report["tokens"]["max"] == 1 + sum(sums["tokens"] for sums in report["media"].values())


def test_a_task_is_shown_with_the_facts_of_its_media_and_as_a_page(folder):
    path = write(folder, {"prompt": "<image><audio>?", "image": "a.png", "audio": "a.wav"})
    result = relax("show", path, "--model", folder / "model", "--html", folder / "page.html")
    assert "40 x 24" in result.stdout and "1 s, 8000 Hz, 1 channels" in result.stdout
    text = (folder / "page.html").read_text()
    sources = re.findall(r'<(img|audio)[^>]* src="data:([a-z/]*);base64,([^"]*)"', text)
    assert [source[:2] for source in sources] == [("img", "image/png"), ("audio", "audio/wav")]
    assert base64.b64decode(sources[0][2]) == IMAGE


def shown(*keys: str) -> tuple[Task, Trajectory]:
    media = [Part(media=Media("image", "data:;base64," + "x" * 999)), Part("?"), Part(media=Media("audio", "<b>.wav"))]
    prompt = (Message("user", tuple(media)),)
    node = Node(None, (1, 2), sampled=False, media=keys)
    return Task("1", prompt), Trajectory((*prompt, Message("assistant", "a")), "a", (node,), Outcome.FINISHED)


def test_records_of_samples_name_their_media_by_key():
    task, trajectory = shown(KEY, "cd" * 16)
    record = sample_record(task, trajectory, ScoredSample(1.0))
    content = record["prompt"][0]["content"]
    assert [part.get("key") for part in content] == [KEY, None, "cd" * 16]
    assert len(content[0]["source"]) < 200 and content[1] == {"type": "text", "text": "?"}
    assert "key" not in sample_record(*shown(KEY), ScoredSample(1.0))["prompt"][0]["content"][0]


def test_the_report_shows_what_samples_show(tmp_path, write_run, monkeypatch):  # noqa: F811
    task, trajectory = shown(KEY, "cd" * 16)
    path = write_run(tmp_path, steps=3)
    previews = path / "stages" / "1-rl" / "media" / "previews"
    Previews(previews, "image").put(KEY, IMAGE)
    record = sample_record(task, trajectory, ScoredSample(1.0))
    monkeypatch.setattr(RunView, "samples", lambda self, step: [record])
    text = render(RunView(path), RunView(path).metrics(), 0.0)
    assert text.count('<img alt="image data:') == 2 and "no copy of this audio was kept" in text
    own = re.sub("<b>(user|assistant|1</b>)", "", text.partition("Last transcripts")[2])
    assert "&lt;b&gt;.wav" in text and "<b>" not in own
    assert "media-src data:" in text and "<script" not in text


def test_a_page_never_shows_bytes_as_another_kind():
    assert "<img" not in medium_figure("image", SOUND, "x") and "<audio" not in medium_figure("audio", b"<html>", "x")
    assert "&lt;i&gt;" in medium_figure("image", IMAGE, "<i>") and "<i>" not in medium_figure("image", IMAGE, "<i>")
    assert [browser_type(data) for data in (IMAGE, SOUND, b"", b"<svg")] == ["image/png", "audio/wav", "", ""]


def test_copies_keep_the_first_and_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr("relax_plugin_media.host.FIRST_BYTES", 200)
    monkeypatch.setattr("relax_plugin_media.host.NEWEST_BYTES", 300)
    previews = Previews(tmp_path, "image")
    for number in range(10):
        previews.put(f"{number:032x}", bytes(100))
    kept = {int(path.stem, 16) for path in tmp_path.iterdir()}
    assert kept == {0, 1, 7, 8, 9} and f"{9:032x}" in Previews(tmp_path, "image")


def test_a_medium_whose_copy_fails_is_processed_anyway(tmp_path):
    from relax_plugin_omni.image import ImageProcessor

    class Odd(ImageProcessor):
        def preview(self, media, data, most_bytes):
            raise ValueError("no copy")

    (tmp_path / "config.json").write_text('{"vision_config": {"patch_size": 8}}')
    host = MediaHost()
    host.component, host.build = None, lambda chosen: Odd()
    host.open(str(tmp_path / "media"), {"path": str(tmp_path)}, 1 << 20, 1 << 20)
    uri = "data:;base64," + base64.b64encode(IMAGE).decode()
    key, layout = host.process(Media("image", uri))
    assert (tmp_path / "media" / f"{key}.media").is_file() and layout[0][1] > 0


def test_a_group_whose_prompt_is_too_long_with_its_media_is_replaced_and_a_run_of_nothing_else_ends():
    class Any0:
        def open(self, tasks): ...
        def pick(self, group, num_tasks, seed):
            return 0

        def learned(self, group, task, rewards): ...

    selection = Selection(Any0(), {}, [Task("1", "a")], [0], 0, refill_limit=3)
    selection.task(0)
    issue = Issue(0, (AttemptId(0, 0, 0),))
    seen = Trajectory((), "", (), Outcome.INVALID_TASK)
    group = InflightGroup(issue, Task("1", "a"), Version("actor", 0, 0), Any0(), trajectories=(seen,))  # type: ignore[arg-type]
    group.unfit, group.scores = "a prompt of 900 tokens", (ScoredSample(float("nan"), outcome=Outcome.INVALID_TASK),)
    selection.take([group])
    assert group.rejected_by == TOO_LONG
    with pytest.raises(RelaxError, match="too-long .a prompt of 900 tokens"):
        for _ in range(3):
            selection.take([group])


def test_a_record_and_its_page_keep_what_tools_were_called_with():
    call = ToolCall("find", {"q": "relax"})
    said = (Message("user", "?"), Message("assistant", "", (call,)), Message("tool", "7 found", name="find"))
    record = sample_record(Task("1", "?"), Trajectory(said, "", ()), ScoredSample(1.0))
    assert record["messages"][1]["tool_calls"] == [{"name": "find", "arguments": {"q": "relax"}}]
    assert record["messages"][2]["name"] == "find" and "tool_calls" not in record["messages"][0]
    of_its_own = Trajectory((Message("user", "!"), Message("assistant", "a")), "a", ())
    assert sample_record(Task("1", "?"), of_its_own, ScoredSample(1.0))["messages"][0]["content"] == "!"
    assert transcript(record).turns[1] == ("assistant", 'find({"q": "relax"})')
