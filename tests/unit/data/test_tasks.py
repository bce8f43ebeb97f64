# SPDX-License-Identifier: Apache-2.0
"""The task set: system prompt, needed columns, length limits, hold-out, and each prompt tokenized once."""

import json

import pytest
from relax_plugin_chat.chat import ChatFamily
from tokenizers import Tokenizer, models, pre_tokenizers

from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError
from relax_core.api.task import Message
from relax_core.data.task_files import JsonLines
from relax_core.data.tasks import ColumnNeed, TaskSet, TaskSettings, hold_out_size

TEMPLATE = (
    "{% for t in tools or [] %}T{% endfor %}"
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content }}{% endfor %}"
    "{{ raise_exception('bad role') if messages[0].role == 'odd' }}"
)


class Counting(ChatFamily):
    """A real family that counts what it renders."""

    def __init__(self):
        super().__init__()
        self.started = 0

    def start(self, prompt, tools=()):
        self.started += 1
        return super().start(prompt, tools)


@pytest.fixture
def family(tmp_path):
    characters = [chr(code) for code in range(32, 127)]
    tokenizer = Tokenizer(
        models.WordLevel({token: place for place, token in enumerate([*characters, "<unk>"])}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    family = Counting()
    family.open({"path": str(tmp_path), "chat_template": TEMPLATE, "tool_calls": "hermes"})
    return family


def opened(tmp_path, family, rows, needs=(), tools=(), **settings):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = JsonLines()
    source.open(str(path), {})
    return TaskSet(source, family, TaskSettings(needs=needs, tools=tools, **settings))


def chat(*words):
    return [{"role": "user", "content": word} for word in words]


def test_a_prompt_is_tokenized_once_on_first_use(tmp_path, family):
    tasks = opened(tmp_path, family, [{"prompt": "ab"}, {"prompt": chat("cd")}])
    assert (len(tasks), family.started) == (2, 0)
    assert family.decode(tasks.prompt(1).tokens) == " ".join("<u>cd")
    assert tasks.prompt(1) is tasks.prompt(1)
    assert family.started == 1
    assert tasks.prompt(0).tokens == family.encode("ab")


def test_the_system_prompt_goes_before_chats_without_one(tmp_path, family):
    own = [{"role": "system", "content": "own"}, *chat("b")]
    tasks = opened(tmp_path, family, [{"prompt": chat("a")}, {"prompt": own}], system_prompt="be good")
    assert tasks[0].prompt == (Message("system", "be good"), Message("user", "a"))
    assert tasks[1].prompt[0].text == "own"
    assert tasks.prompt(0).tokens == family.encode("<s>be good<u>a")


def test_a_bare_string_cannot_carry_a_system_prompt(tmp_path, family):
    with pytest.raises(ConfigError, match=r"system_prompt.*tasks\.jsonl:2.*messages"):
        opened(tmp_path, family, [{"prompt": chat("a")}, {"prompt": "b"}], system_prompt="s")


def test_a_column_that_a_reward_needs_is_missed_with_line_and_reward(tmp_path, family):
    needs = (ColumnNeed("maths", ("answer",)), ColumnNeed("style", ("tone",), lambda task: task.column("tonal")))
    good = {"prompt": "a", "answer": 1}
    assert len(opened(tmp_path, family, [good, {**good, "tone": "x", "tonal": True}], needs)) == 2
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:2 without a value for 'tone', which style reads"):
        opened(tmp_path, family, [good, {**good, "tonal": True}], needs)
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:1 without a value for 'answer', which maths reads"):
        opened(tmp_path, family, [{"prompt": "a", "answer": None}], needs)


def test_rows_can_be_examined_one_by_one_without_stopping_at_a_bad_one(tmp_path, family):
    odd = [{"role": "odd", "content": "a"}]
    rows = [
        {"prompt": "abc", "answer": 1},
        {"prompt": "b"},
        {"prompt": odd, "answer": 2},
        {"prompt": "a" * 9, "answer": 3},
    ]
    opened(tmp_path, family, rows)
    source = JsonLines()
    source.open(str(tmp_path / "tasks.jsonl"), {})
    tasks = TaskSet(
        source, family, TaskSettings(max_prompt_tokens=8, needs=(ColumnNeed("maths", ("answer",)),)), check=False
    )
    assert tasks.examine(0).tokens == family.encode("abc")
    with pytest.raises(ConfigError, match="which maths reads"):
        tasks.examine(1)
    with pytest.raises(ConfigError, match="bad role"):
        tasks.examine(2)
    assert tasks.examine(3) is None


ROWS = [
    {"prompt": "a" * 10},
    {"prompt": "b" * 30},
    {"prompt": "é" * 10},
    {"prompt": chat("c" * 27)},
    {"prompt": chat("d" * 28)},
]


def test_long_prompts_are_skipped_and_counted(tmp_path, family):
    tasks = opened(tmp_path, family, ROWS, max_prompt_tokens=30)
    assert [len(tasks.prompt(index).tokens) for index in range(len(tasks))] == [10, 30, 10, 30]
    assert (tasks.num_skipped, tasks.where(3)) == (1, f"{tmp_path / 'tasks.jsonl'}:4")


def test_long_prompts_are_cut_where_the_policy_does_not_speak(tmp_path, family):
    tasks = opened(tmp_path, family, ROWS, max_prompt_tokens=12, too_long="truncate")
    assert len(tasks) == len(ROWS)
    assert tasks.prompt(3).tokens == family.encode("c" * 12)


def test_long_prompts_are_refused_with_their_length(tmp_path, family):
    with pytest.raises(ConfigError, match=r"got 30, but the prompt at .*tasks\.jsonl:5 has 31 tokens"):
        opened(tmp_path, family, ROWS, max_prompt_tokens=30, too_long="error")
    with pytest.raises(ConfigError, match="every prompt exceeds"):
        opened(tmp_path, family, ROWS, max_prompt_tokens=3)
    with pytest.raises(ConfigError, match=r"data\.too_long"):
        opened(tmp_path, family, ROWS, too_long="shrug")


def test_short_prompts_are_not_tokenized_to_see_that_they_fit(tmp_path, family):
    opened(tmp_path, family, [{"prompt": chat("ab")}] * 50, max_prompt_tokens=100)
    assert family.started == 1


def test_a_prompt_that_the_template_refuses_is_named_by_its_row(tmp_path, family):
    odd = [{"role": "odd", "content": "a"}]
    tasks = opened(tmp_path, family, [{"prompt": "a"}, {"prompt": odd}])
    with pytest.raises(ConfigError, match=r"bad role.*tasks\.jsonl:2"):
        tasks.prompt(1)
    with pytest.raises(ConfigError, match=r"bad role.*tasks\.jsonl:2"):
        opened(tmp_path, family, [{"prompt": "a"}, {"prompt": odd}], max_prompt_tokens=50)


def test_tools_are_part_of_the_prompt(tmp_path, family):
    tasks = opened(tmp_path, family, [{"prompt": chat("a")}], tools=(Tool("t"), Tool("u")))
    assert tasks.prompt(0).tokens == family.encode("TT<u>a")


def test_a_hold_out_is_seeded_disjoint_and_whole(tmp_path, family):
    tasks = opened(tmp_path, family, [{"prompt": str(number)} for number in range(20)])
    train, held = tasks.hold_out(5, seed=3)
    assert len(held) == 5 and sorted((*train, *held)) == list(range(20))
    assert tasks.hold_out(5, seed=3) == (train, held)
    assert tasks.hold_out(5, seed=4)[1] != held
    assert tasks.hold_out(0, seed=3) == (range(20), ())
    assert tasks.hold_out(None, seed=3) == tasks.hold_out(2, seed=3), "a tenth by default"
    with pytest.raises(ConfigError, match="at least one task to train on"):
        tasks.hold_out(20, seed=0)


def test_a_tenth_of_the_tasks_is_held_out_by_default_and_any_given_number():
    sizes = {count: hold_out_size(None, count) for count in (2, 19, 32, 200, 1280, 100_000)}
    assert sizes == {2: 1, 19: 1, 32: 3, 200: 20, 1280: 128, 100_000: 128}
    assert (hold_out_size(128, 200), hold_out_size(0, 1)) == (128, 0)
    with pytest.raises(ConfigError, match="1 of 1 tasks.*eval.every = 0"):
        hold_out_size(None, 1)


def test_the_rows_that_a_run_held_out_first_stay_held_out(tmp_path, family):
    tasks = opened(tmp_path, family, [{"prompt": "long " * (number % 3) + str(number)} for number in range(20)])
    first = tasks.hold_out(5, 3, str(tmp_path))
    assert first == tasks.hold_out(5, 3) == tasks.hold_out(0, 3, str(tmp_path)) == tasks.hold_out(7, 4, str(tmp_path))
    fewer = opened(
        tmp_path, family, [{"prompt": "x" * (number % 3) + "y"} for number in range(20)], max_prompt_tokens=2
    )
    train, held = fewer.hold_out(5, 3, str(tmp_path))
    rows = {index: int(fewer.where(index).rpartition(":")[2]) - 1 for index in range(len(fewer))}
    assert len(rows) < 20 and {rows[index] for index in held} == {*first[1]} & {*rows.values()}, "known by their rows"
    assert sorted((*train, *held)) == sorted(rows)


@pytest.mark.parametrize("content", ["{}", '{"size": 2, "rows": [1]}', '{"size": 2, "rows": 1}', "[]", "no"])
def test_a_damaged_list_of_held_out_rows_is_refused_by_name(tmp_path, family, content):
    tasks = opened(tmp_path, family, [{"prompt": str(number)} for number in range(5)])
    (tmp_path / "held-out.json").write_text(content)
    with pytest.raises(ConfigError, match=r"held-out\.json"):
        tasks.hold_out(2, 3, str(tmp_path))


def test_the_content_of_a_task_is_its_prompt_and_for_a_longer_game_its_row(tmp_path, family):
    rows = [{"prompt": chat("Play."), "seed": seed, "environment": name} for name in ("", "game") for seed in (1, 2)]

    def keys(**settings):
        tasks = opened(tmp_path, family, rows, answered_once=lambda task: not task.environment, **settings)
        return [tasks.content(index).key for index in range(4)]

    plain = keys()
    assert plain[0] == plain[1] and len(set(plain)) == 3
    assert keys(system_prompt="be good") == plain


def test_tasks_of_an_evaluation_set_carry_its_name_which_is_not_part_of_their_content(tmp_path, family):
    rows = [{"prompt": "a", "answer": "1", "eval_set": "aime"}, {"prompt": "b", "answer": "2"}]
    needs = (ColumnNeed("exact", ("missing",), lambda task: task.column("eval_set") == "other"),)
    plain = opened(tmp_path, family, rows, answered_once=lambda task: False)
    named = opened(
        tmp_path, family, rows, needs, filters=["eval_set=aime"], eval_set="aime", answered_once=plain._answered_once
    )
    assert [named[at].column("eval_set") for at in (0, 1)] == ["aime", "aime"] and named.unmatched == []
    assert plain[1].column("eval_set") is None
    with pytest.raises(ConfigError, match=r"column eval_set is 'aime'; .* columns = \{given = \"eval_set\"\}"):
        opened(tmp_path, family, rows, eval_set="other")
    assert [named.content(at).key for at in (0, 1)] == [plain.content(at).key for at in (0, 1)]
