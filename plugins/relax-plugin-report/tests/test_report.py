# SPDX-License-Identifier: Apache-2.0
"""The page: whole, self-contained, escaped, and there for runs that hardly began."""

from html.parser import HTMLParser

import pytest
from relax_plugin_report import plugin
from relax_plugin_report.charts import lines, nice_ticks, thin
from relax_plugin_report.report import write_report
from relax_plugin_report.transcript import LONGEST, transcript

from relax_core.api.events import RunClosed
from relax_core.observe.run_directory import RunDirectory


class Page(HTMLParser):
    """Collects what a browser would load or run, and checks that tags close."""

    void = {"meta", "line", "rect", "circle", "polyline", "br", "img", "link"}

    def __init__(self, text):
        super().__init__()
        self.loads, self.handlers, self.open, self.tags = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for key, value in attributes if key in ("src", "href", "xlink:href", "data", "action")]
        self.handlers += [key for key, _ in attributes if key.startswith("on")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.void:
            assert self.open.pop() == tag


def page(path):
    text = write_report(path).read_text()
    parsed = Page(text)
    assert parsed.open == [] and parsed.loads == [] and parsed.handlers == []
    assert not {"script", "iframe", "link", "img"} & set(parsed.tags) and "url(" not in text and "@import" not in text
    return text


def test_a_finished_run_has_everything_on_its_page(tmp_path, write_run):
    path = write_run(tmp_path)
    text = page(path)
    assert (path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "issued 4,848 = trained 4,792 + dropped 8 + in flight 48" in text
    assert 'class="line line-2"' in text and text.count('class="dots dots-1"') == 4
    expected = (
        "First transcripts (step 1)",
        "Last transcripts (step 120)",
        "Lag of trained samples",
        "engine-0 ended with signal 9",
        "0123abc with local changes",
        "prefers-color-scheme: dark",
        'name="viewport"',
    )
    for words in expected:
        assert words in text, words
    assert "± 0.062 (step 30)" in text and "± 0.062 (step 120)" in text


def test_text_of_policies_is_escaped_on_pages(tmp_path, write_run):
    attack = "<script>alert(1)</script><img src=x onerror=alert(1)>{{ 7*7 }}</pre>\x00\ud83d"
    text = page(write_run(tmp_path, steps=2, extra=attack))
    assert "&lt;script&gt;alert(1)" in text and "{{ 7*7 }}" in text


def test_control_characters_are_escaped(tmp_path, write_run):
    text = page(write_run(tmp_path, steps=2, extra="\x1b]0;x\x07 \x9b \u202eab\u2066 \x00 \r"))
    assert "\\u001b]0;x\\u0007 \\u009b \\u202eab\\u2066 \\u0000 \\u000d" in text
    assert not set(text) & set("\x1b\x07\x9b\u202e\u2066\0\r")


def test_an_unbalanced_account_is_reported(tmp_path, write_run):
    path = write_run(tmp_path, steps=2)
    run = RunDirectory.open(path)
    run.write("summary", {**run.read("summary"), "samples_trained": 1})
    assert "issued 128 ≠ trained 1 + dropped 8 + in flight 48" in page(path)


def test_a_failed_run_shows_its_error(tmp_path, write_run):
    path = write_run(tmp_path, steps=1)
    run = RunDirectory.open(path)
    run.write("summary", {**run.read("summary"), "error": "reward.maths: <no answer>"})
    assert "reward.maths: &lt;no answer&gt;" in page(path)


def test_a_run_that_goes_and_one_that_never_stepped_have_a_page(tmp_path, write_run):
    assert "3 of 120 steps, last status" in page(write_run(tmp_path, steps=3, ending=None))
    assert "No step has been trained." in page(write_run(tmp_path, steps=0, ending="failed"))


def test_a_directory_with_only_a_configuration_has_a_page(tmp_path):
    (tmp_path / "config.toml").write_text("")
    assert "no status written yet" in page(tmp_path)


def test_long_runs_make_light_pages(tmp_path, write_run):
    points = [(step, step % 7) for step in range(100_000)]
    assert len(thin(points)) <= 601 and thin(points)[-1] == points[-1]
    assert len(lines({"x": points}, {}, "x").svg()) < 20_000


def test_ticks_are_round_and_enclose():
    assert nice_ticks(0.31, 0.79) == [0.2, 0.4, 0.6, 0.8]
    assert nice_ticks(0, 0)[0] < 0 < nice_ticks(0, 0)[-1]
    assert nice_ticks(0.248046875, 0.248046875 + 2e-12)[-1] > 0.25, "a difference of rounding is none"
    for low, high in ((-3.2, 1e5), (0.9999, 1.0), (5, 5), (-1e-9, 1e-9)):
        ticks = nice_ticks(low, high)
        assert ticks[0] <= low + 1e-12 and ticks[-1] >= high - 1e-12 and 2 <= len(ticks) <= 8


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e-18, 1e-13, 1.0, 1e12, 1e250])
def test_values_of_any_size_are_drawn(size):
    for low, high in ((0.05, 1.2), (1.0, 1.0), (-1.0, 1.0), (-1.2, -0.05), (0.0, 0.0)):
        ticks = nice_ticks(low * size, high * size)
        assert 2 <= len(set(ticks)) == len(ticks) <= 9 and ticks[0] <= low * size and ticks[-1] >= high * size
        assert "nan" not in lines({"x": [(1, low * size), (2, high * size)]}, {}, "x").svg()


def test_a_transcript_takes_what_it_gets():
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"text": "what?"}]},
        {"role": "assistant", "content": "x" * 9000},
    ]
    shown = transcript({"messages": turns, "response": "x", "reward": None, "outcome": "reward_timeout"})
    assert shown.reward == "reward_timeout" and shown.turns[0] == ("user", "[image]what?")
    assert shown.turns[1][1].endswith(f"and {9000 - LONGEST} more characters") and len(shown.turns) == 2
    assert transcript({"prompt": "2+2=", "response": "4", "reward": 1}).turns == (
        ("prompt", "2+2="),
        ("assistant", "4"),
    )
    assert transcript({}).reward == "no reward"


def test_the_end_of_a_run_writes_the_report_and_a_failure_is_a_warning(tmp_path, write_run, capsys):
    path = write_run(tmp_path, steps=2)
    plugin.relax_run_closed(RunClosed(str(path), "finished"))
    assert (path / "report.html").is_file() and (path / "reward.png").is_file()
    (path / "report.html").unlink()
    (path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": "high"}\n')
    capsys.readouterr()
    plugin.relax_run_closed(RunClosed(str(path), "finished"))
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("relax: no report written: ")
    assert said.err.endswith(f"write it later with `relax report {path}`\n") and not (path / "report.html").exists()
