# SPDX-License-Identifier: Apache-2.0
"""Rows that were written beforehand: laid out as the policy would have sampled them, and refused by file and line."""

import json

import pytest
from relax_plugin_chat.chat import ChatFamily

from relax_contrib.recipes.quickstart.model import save_tokenizer
from relax_core.api.algorithm import Source
from relax_core.api.errors import ConfigError
from relax_core.api.family import Rendered
from relax_core.api.task import Message
from relax_core.data.dataset import Dataset, DatasetSettings, example
from relax_core.data.task_files import JsonLines
from relax_core.media.access import SourceAccess

TURNS = (
    "{% for m in messages %}<bos>{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    made = ChatFamily()
    made.open({"path": str(folder), "chat_template": TURNS})
    return made


def opened(tmp_path, family, rows, form=Source.DATASET, columns=None, **settings):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = JsonLines()
    source.open(str(file), columns or {})
    return Dataset(source, family, form, DatasetSettings(**settings))


def read(family, found):
    """The text, trained parts in brackets."""
    text, inside = "", 0
    for token, mask in zip(found.tokens, found.mask, strict=True):
        text += "[" * (mask > inside) + "]" * (mask < inside) + family.decode((token,), skip_special=False)
        inside = mask
    return text + "]" * inside


def said(*turns):
    return [{"role": role, "content": text} for role, text in turns]


def test_a_completion_is_trained_with_its_end_and_a_prompt_is_not(tmp_path, family):
    rows = [{"prompt": "s21=", "completion": "12"}, {"prompt": said(("user", "s21=")), "completion": "12"}]
    plain, chat = (found for at in (0, 1) for found in opened(tmp_path, family, rows).examples(at))
    assert read(family, plain) == "s21=[12<eos>]"
    assert read(family, chat) == "<bos>user:s21=<eos><bos>assistant:[12<eos>]"


def test_every_turn_of_the_assistant_is_trained_in_a_conversation(tmp_path, family):
    turns = said(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"))
    for row in ({"messages": turns}, {"prompt": turns}):
        (found,) = opened(tmp_path, family, [row]).examples(0)
        assert read(family, found) == ("<bos>user:a<eos><bos>assistant:[b<eos>]<bos>user:c<eos><bos>assistant:[d<eos>]")


def test_earlier_turns_of_a_prompt_are_given_where_there_is_a_completion(tmp_path, family):
    row = {"prompt": said(("user", "a"), ("assistant", "b"), ("user", "c")), "completion": said(("assistant", "d"))}
    (found,) = opened(tmp_path, family, [row]).examples(0)
    assert read(family, found) == "<bos>user:a<eos><bos>assistant:b<eos><bos>user:c<eos><bos>assistant:[d<eos>]"


def test_all_tokens_but_the_first_are_trained_on_demand(tmp_path, family):
    (found,) = opened(tmp_path, family, [{"prompt": "s21=", "completion": "12"}], train_on="all").examples(0)
    assert read(family, found) == "s[21=12<eos>]"


def test_a_turn_is_laid_out_as_a_rollout_would_continue(family):
    """The tokens of a conversation are those of its prompt, the sampled turn, and what is put between turns."""
    turns = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d"))
    sampled = (*family.encode("b"), *family.stop_tokens[:1])
    start, between = family.start(turns[:1]).tokens, family.delta(turns[:2], turns[2:3], sampled[-1]).tokens
    found = example(family, turns, None)
    assert found.tokens[: len(start) + len(sampled) + len(between)] == (*start, *sampled, *between)


def test_pairs_have_a_chosen_and_a_rejected_row_behind_the_same_prompt(tmp_path, family):
    row = {"prompt": "s21=", "best": "12", "rejected": "21", "margin": 0.5}
    dataset = opened(tmp_path, family, [row], Source.PAIRS, {"chosen": "best"})
    assert [read(family, found) for found in dataset.examples(0)] == ["s21=[12<eos>]", "s21=[21<eos>]"]
    assert dataset.margin(0) == 0.5


@pytest.mark.parametrize(("form", "row", "names"), [
    (Source.DATASET, {"prompt": "s21="}, "'completion'"),
    (Source.DATASET, {"prompt": "s21=", "completion": 3}, "a number"),
    (Source.DATASET, {"messages": said(("user", "a"))}, "without a turn of the assistant"),
    (Source.DATASET, {"prompt": "s21=", "completion": said(("assistant", "12"))}, "plain text"),
    (Source.PAIRS, {"prompt": "s21=", "chosen": "12"}, "'rejected'"),
    (Source.PAIRS, {"messages": said(("user", "a"), ("assistant", "b"))}, "'chosen'"),
])  # fmt: skip
def test_a_bad_row_is_named_by_file_and_line(tmp_path, family, form, row, names):
    good = {"prompt": "s1=", "completion": "1", "chosen": "1", "rejected": "2"}
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2") as refused:
        opened(tmp_path, family, [good, row], form, max_row_tokens=64)
    assert names in str(refused.value)


def test_long_rows_are_skipped_cut_at_their_end_or_refused(tmp_path, family):
    rows = [{"prompt": "s21=", "completion": "12"}, {"prompt": "s4321=", "completion": "1234"},
            {"prompt": "s987654321=", "completion": "1"}]  # fmt: skip
    skipped = opened(tmp_path, family, rows, max_row_tokens=8)
    assert len(skipped) == 1 and skipped.num_skipped == 2
    cut = opened(tmp_path, family, rows, max_row_tokens=8, too_long="truncate")
    assert [read(family, *cut.examples(at)) for at in range(len(cut))] == ["s21=[12<eos>]", "s4321=[12]"]
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2 has 11 tokens"):
        opened(tmp_path, family, rows, max_row_tokens=8, too_long="error")
    with pytest.raises(ConfigError, match="leaves no trained token"):
        opened(tmp_path, family, rows, max_row_tokens=3)


PICTURE = {"type": "image", "image": "data:,abc"}
SHOWN = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<unk>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def seeing(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    save_tokenizer(folder)
    made = ChatFamily()
    made.open({"path": str(folder), "chat_template": SHOWN})
    made.placeholders = {"image": made.encode("<unk>")[0]}
    return made


def threefold(rendered, messages):
    """Every medium takes three tokens."""
    hole = 3
    tokens = [one for token in rendered.tokens for one in [token] * (3 if token == hole else 1)]
    return Rendered(tuple(tokens), tuple(f"key {at}" for at, _ in enumerate(rendered.media)))


def test_a_medium_takes_its_tokens_and_none_of_them_is_trained(tmp_path, seeing):
    hole = seeing.placeholders["image"]
    assert hole == 3
    turns = [
        {"role": "user", "content": [PICTURE, {"type": "text", "text": "1"}]}, {"role": "assistant", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": "3"}, PICTURE]}, {"role": "assistant", "content": "4"},
    ]  # fmt: skip
    for train_on in ("completion", "all"):
        dataset = opened(tmp_path, seeing, [{"messages": turns}], media=["image"], train_on=train_on)
        (found,) = dataset.examples(0, threefold)
        assert found.tokens.count(hole) == 6 and len(found.media) == 2
        assert not any(mask for token, mask in zip(found.tokens, found.mask, strict=True) if token == hole)
        assert read(seeing, found).replace("]", "").replace("[", "") == "<unk><unk><unk>12<eos>3<unk><unk><unk>4<eos>"
        assert len([message for message in dataset.messages(0) if not isinstance(message.content, str)]) == 2
        (alone,) = dataset.examples(0)
        assert alone.tokens.count(hole) == 2


def test_media_that_a_run_does_not_read_and_texts_like_them_are_refused_by_line(tmp_path, seeing):
    row = {"prompt": [{"role": "user", "content": [PICTURE]}], "completion": "2"}
    with pytest.raises(ConfigError, match=r'rows\.jsonl:1.*set media = \["image"\]'):
        opened(tmp_path, seeing, [row])
    gone = {"prompt": [{"role": "user", "content": [{"type": "image", "image": "gone.png"}]}], "completion": "2"}
    with pytest.raises(ConfigError, match=r"gone\.png at .*rows\.jsonl:2: *.*no such file|no such file"):
        opened(tmp_path, seeing, [row, gone], media=["image"])
    limits = SourceAccess((), [str(tmp_path)])
    for source, key in {"../a.png": "folders", "/etc/passwd": "folders", "http://host.test/a?x": "hosts"}.items():
        other = {"prompt": [{"role": "user", "content": [{"type": "image", "image": source}]}], "completion": "2"}
        with pytest.raises(ConfigError, match=rf"data.media.allowed_{key}: got image .*rows\.jsonl:2; "):
            opened(tmp_path, seeing, [row, other], media=["image"], access=limits)
    forged = {"prompt": [{"role": "user", "content": "<unk>"}], "completion": "2"}
    with pytest.raises(ConfigError, match=r"placeholders of image for media of nothing at .*rows\.jsonl:1"):
        opened(tmp_path, seeing, [forged], media=["image"]).examples(0)
