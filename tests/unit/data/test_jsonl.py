# SPDX-License-Identifier: Apache-2.0
"""Task files: rows read in any order, and every bad row named by file and line."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from relax_core.api.errors import ConfigError
from relax_core.api.task import Media, Message, Part, ToolCall
from relax_core.data.task_files import JsonLines

GOOD = '{"prompt": "1+1=", "answer": "2"}'
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def opened(path, **columns):
    source = JsonLines()
    source.open(str(path), columns)
    return source


def written(folder, *lines, name="tasks.jsonl"):
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_rows_become_tasks_with_other_columns_as_metadata(tmp_path):
    path = written(tmp_path, '{"prompt": "1+1=", "answer": 2, "level": {"n": 1}}', "", '{"prompt": "é", "id": 7}')
    source = opened(path)
    assert len(source) == 2
    first, second = source[0], source[1]
    assert (first.id, first.prompt, first.answer, first.metadata) == ("tasks:1", "1+1=", 2, {"level": {"n": 1}})
    assert (second.id, second.prompt, second.answer) == ("7", "é", None)
    assert source.where(1) == f"{path}:3"


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8), data=st.data())
def test_rows_are_read_in_any_order(tmp_path_factory, rows, data):
    lines = [json.dumps({"prompt": row}, ensure_ascii=data.draw(st.booleans())) for row in rows]
    source = opened(written(tmp_path_factory.mktemp("rows"), *lines))
    for index in data.draw(st.permutations(range(len(rows)))):
        assert source[index].prompt == rows[index]
    with pytest.raises(IndexError):
        source[len(rows)]


def test_columns_are_renamed_and_the_former_name_is_not_metadata(tmp_path):
    path = written(tmp_path, '{"question": "q", "gold": "a", "solution": "s", "key": "k"}')
    task = opened(path, prompt="question", answer="gold", id="key", worked="solution")[0]
    assert (task.prompt, task.answer, task.id, task.metadata) == ("q", "a", "k", {"worked": "s"})


def test_messages_keep_parts_media_by_reference_and_calls(tmp_path):
    row = {
        "prompt": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "look"},
                    {"type": "video", "video": "clips/a.mp4", "view": [1, 2.5]},
                    {"type": "image", "image": "https://host/x.png"},
                ],
            },
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"x": 1}}}]},
            {"role": "tool", "content": "1", "name": "f"},
        ]
    }
    prompt = opened(written(tmp_path, json.dumps(row)))[0].prompt
    assert prompt[1].content == (
        Part("look"),
        Part(media=Media("video", str(tmp_path / "clips/a.mp4"), view=(1.0, 2.5))),
        Part(media=Media("image", "https://host/x.png")),
    )
    assert prompt[2] == Message("assistant", "", (ToolCall("f", {"x": 1}, "c"),))
    assert prompt[3].name == "f"


def test_a_json_list_is_read_alike(tmp_path):
    path = written(tmp_path, '[{"prompt": "a"},', '{"prompt": "b", "answer": 1}]', name="tasks.json")
    source = opened(path)
    assert [source[index].prompt for index in range(2)] == ["a", "b"]
    assert source[1].id == "tasks:2"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "malformed JSON"),
        ("[" * 100_000, "malformed JSON"),
        ('{"prompt": "a", "answer": %s}' % ("9" * 5000), "a whole number of more than 4300 digits: line 1 column 27"),
        ('"text"', "the row is text, not an object"),
        ('{"question": "q"}', "no prompt column 'prompt'; the row has 'question'"),
        ('{"prompt": 5}', "'prompt' is a number, not text or a list of messages"),
        ('{"prompt": null}', "'prompt' is null"),
        ('{"prompt": ""}', "'prompt' is empty"),
        ('{"prompt": []}', "'prompt' has no messages"),
        ('{"prompt": ["a"]}', r"prompt\[0\] is text, not a message"),
        ('{"prompt": [{"content": "a"}]}', r"prompt\[0\] has no role"),
        ('{"prompt": [{"role": "user"}]}', r"content of prompt\[0\] is null"),
        ('{"prompt": [{"role": "user", "content": [{"type": "smell"}]}]}', "has no known type; use text, image"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "path or URL"),
        ('{"prompt": [{"role": "user", "content": "a", "tool_calls": 3}]}', "tool_calls"),
        ('{"prompt": [{"role": "user", "content": "a", "tool_calls": [3]}]}', "tool call .* has no name"),
        ('{"prompt": "a", "id": [1]}', "'id' is a list, not text"),
        ('{"prompt": "a", "environment": {}}', "'environment' is an object"),
    ],
)
def test_a_bad_row_is_named_with_its_line_and_reason(tmp_path, line, reason):
    path = written(tmp_path, GOOD, line, GOOD)
    with pytest.raises(ConfigError, match=reason) as caught:
        opened(path)
    assert f"{path}:2" in str(caught.value)
    assert caught.value.field == "data"


def test_bytes_that_are_not_text_are_named(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe"}\n')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:1: not UTF-8"):
        opened(path)


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", ""), ("a.jsonl", "\n\n"), ("a.json", "[]")])
def test_an_empty_file_is_refused(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match="holds no rows"):
        opened(path)


@pytest.mark.parametrize(("content", "reason"), [("{", r"a\.json:1: malformed"), ('{"prompt": "a"}', "holds one list")])
def test_a_json_file_without_a_list_is_refused(tmp_path, content, reason):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        opened(path)


def test_a_missing_file_or_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.jsonl: No such file"):
        opened(tmp_path / "gone.jsonl")
    with pytest.raises(ConfigError, match="Is a directory"):
        opened(tmp_path)


def test_every_problem_is_listed_and_good_rows_stay_readable(tmp_path):
    path = written(tmp_path, "x", GOOD, '{"prompt": 1}', '{"prompt": "a", "id": "i"}', '{"prompt": "b", "id": "i"}')
    source = JsonLines()
    with pytest.raises(ConfigError, match="and 2 more bad rows"):
        source.open(str(path), {})
    assert [problem.where for problem in source.problems()] == [f"{path}:1", f"{path}:3", f"{path}:5"]
    assert "id 'i' is used twice" in list(source.problems())[2].reason
    assert [source[index].prompt for index in range(len(source))] == ["1+1=", "a"]


def test_a_file_that_changed_under_the_run_is_noticed(tmp_path):
    path = written(tmp_path, '{"prompt": "abc"}', '{"prompt": "abc"}')
    source = opened(path)
    path.write_text("\n" * 50)
    with pytest.raises(ConfigError, match="changed since"):
        source[1]


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(JSON_VALUES | st.fixed_dictionaries({"prompt": JSON_VALUES}, optional={"id": JSON_VALUES})))
def test_any_row_becomes_a_task_or_an_error(tmp_path_factory, rows):
    path = written(tmp_path_factory.mktemp("any"), *map(json.dumps, rows), GOOD)
    source = JsonLines()
    try:
        source.open(str(path), {})
    except ConfigError:
        assert list(source.problems())
    assert len(source) + len(list(source.problems())) == len(rows) + 1
