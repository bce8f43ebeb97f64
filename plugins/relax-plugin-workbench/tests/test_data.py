# SPDX-License-Identifier: Apache-2.0
"""`relax data`: every bad row with its reason and exit code 2; a prompt shown token by token."""

import json

import pytest
from relax_plugin_workbench.task_page import task_page
from typer.testing import CliRunner

from relax_contrib.recipes.quickstart.model import save_tokenizer as quickstart
from relax_core.api.errors import ConfigError
from relax_core.cli.main import app
from tests.ascii_tokenizer import save_ascii_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{{ raise_exception('odd') if 'odd' in messages[0].content }}"
)
GOOD = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2", "level": 3}
REWARD = '''
from relax_core.api import Reward


class Strict(Reward):
    """Needs a level."""

    needs_columns = ("level",)

    def score(self, task, trajectory):
        return 1.0
'''
ENVIRONMENT = '''
from relax_core.api import Environment, Tool


class Lookup(Environment):
    """Has a tool."""

    tools = (Tool("search", {"query": str}),)
'''
CONFIGURATION = """
plugins = ["./strict.py", "./lookup.py"]
rewards = ["strict"]
environment = "lookup"
[model]
path = "model"
tool_calls = "hermes"
[data]
train = "tasks.jsonl"
columns = {prompt = "question"}
max_prompt_tokens = 60
[[eval.sets]]
name = "held"
path = "held.jsonl"
columns = {prompt = "prompt"}
"""


@pytest.fixture
def folder(tmp_path):
    save_ascii_tokenizer(tmp_path / "model")
    (tmp_path / "model/config.json").write_text('{"eos_token_id": 0, "model_type": "qwen3"}')
    (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def write(folder, *rows, name="tasks.jsonl"):
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def relax(*arguments):
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_good_file_is_counted(folder):
    result = relax("check", write(folder, GOOD, {"prompt": "x"}))
    assert result.exit_code == 0
    assert "2 usable, 0 bad" in result.stdout
    assert "prompt 2, answer 1, level 1" in result.stdout


def test_every_bad_row_is_listed_and_ends_with_two(folder):
    path = write(folder, "{", GOOD, {"prompt": 3})
    result = relax("check", path)
    assert result.exit_code == 2
    assert f"{path}:1: malformed JSON" in result.stdout and f"{path}:3: 'prompt' is a number" in result.stdout
    assert "1 usable, 2 bad" in result.stdout


def test_with_a_model_the_check_reports_lengths_and_template_errors(folder):
    odd = {"prompt": [{"role": "user", "content": "odd"}]}
    rows = [{"prompt": "a" * length} for length in (1, 2, 3, 40)]
    result = relax("check", write(folder, *rows, odd), "--model", folder / "model", "--json")
    assert result.exit_code == 2
    (report,) = json.loads(result.stdout)["files"]
    assert report["tokens"] == {"min": 1, "p50": 2, "p90": 3, "p99": 3, "max": 40}
    assert (report["usable"], report["skipped"]) == (4, 0)
    assert report["bad"][0]["where"].endswith(":5") and "odd" in report["bad"][0]["reason"]


def test_a_first_row_whose_tokens_lack_its_words_is_bad(folder):
    quickstart(folder / "model")
    path = write(folder, {"prompt": "s12="}, {"prompt": "s1\N{GREEK CAPITAL LETTER OMEGA}2="})
    result = relax("check", path, "--model", folder / "model")
    assert result.exit_code == 2 and "1 usable, 1 bad" in result.stdout
    assert (
        f"{path}:2: the template wrote 's1\N{GREEK CAPITAL LETTER OMEGA}2=', and its tokens read 's1<unk>2='"
        in result.stdout
    )


def test_a_prompt_is_shown_with_its_tokens_apart(folder):
    path = write(folder, {"prompt": "x"}, GOOD)
    result = relax("show", path, "--model", folder / "model", "--index", 1)
    assert result.exit_code == 0
    assert "<│u│s│e│r│>│1│+│1│=│⏎" in result.stdout
    assert "ids       60 117 115 101 114 62 49 43 49 61 10" in result.stdout
    assert 'answer    "2"' in result.stdout and "level     3" in result.stdout
    assert "a turn ends with <end>" in result.stdout


def test_shown_as_json_it_is_one_document(folder):
    shown = json.loads(relax("show", write(folder, GOOD), "--model", folder / "model", "--json").stdout)
    assert "".join(shown["tokens"]) == "<user>1+1=\n"
    assert (shown["answer"], shown["metadata"], shown["id"]) == ("2", {"level": 3}, "tasks:1")


def test_a_configuration_names_files_columns_rewards_and_limits(folder):
    write(
        folder, {**GOOD, "question": GOOD["prompt"]}, {"question": "x", "answer": 1}, {"question": "y" * 99, "level": 1}
    )
    write(folder, GOOD, name="held.jsonl")
    (folder / "strict.py").write_text(REWARD)
    (folder / "lookup.py").write_text(ENVIRONMENT)
    (folder / "my.toml").write_text(CONFIGURATION)
    result = relax("check", folder / "my.toml", "--json")
    train, held = json.loads(result.stdout)["files"]
    assert result.exit_code == 2
    assert [(train["usable"], train["skipped"]), (held["usable"], held["skipped"])] == [(1, 1), (1, 0)]
    (bad,) = train["bad"]
    assert bad["where"].endswith("tasks.jsonl:2") and "'level', which strict reads" in bad["reason"]
    assert "1+1=" in "".join(json.loads(relax("show", folder / "my.toml", "--json").stdout)["tokens"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("check", "gone.jsonl"), "No such file"),
        (("check", "tasks.csv"), r"\.jsonl"),
        (("check", "empty.jsonl"), "holds no rows"),
        (("check", "tasks.jsonl", "--model", "gone"), "model.path"),
        (("show", "tasks.jsonl"), "--model"),
        (("show", "tasks.jsonl", "--model", "model", "--index", "5"), "choose 0 to 0"),
        (("show", "bad.jsonl", "--model", "model"), r"bad\.jsonl:1"),
    ],
)
def test_an_unreadable_file_is_one_error(folder, monkeypatch, arguments, said):
    monkeypatch.chdir(folder)
    write(folder, GOOD)
    write(folder, name="empty.jsonl")
    write(folder, "{", name="bad.jsonl")
    with pytest.raises(ConfigError, match=said):
        relax(*arguments)


def test_control_characters_are_escaped_on_the_page_of_a_task():
    attack = "\x1b]0;x\x07 \u202eab"
    shown = {"where": attack, "id": attack, "ids": [1], "media": [], "tokens": [attack], "answer": attack}
    text = task_page({**shown, "metadata": {attack: 1}}, [])
    assert "\\u001b]0;x\\u0007 \\u202eab" in text and not set(text) & set("\x1b\x07\u202e")
