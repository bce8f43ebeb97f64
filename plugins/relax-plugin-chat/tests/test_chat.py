# SPDX-License-Identifier: Apache-2.0
"""Text is tokenized once: for every shape of template, turns are appended and sampled ids stay what they were."""

import json

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from relax_core.api.environment import Tool
from relax_core.api.errors import ConfigError
from relax_core.api.task import Media, Message, Part, ToolCall
from tests.chat.models import GLM, SHAPES, Shape, open_family, write_model

WORDS = st.text(alphabet="abc help 12+=\n", min_size=0, max_size=12)
PLAIN = WORDS.map(str.strip).filter(bool)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return {name: open_family(write_model(tmp_path_factory.mktemp(name), shape)) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(PLAIN, PLAIN), min_size=1, max_size=4))
def test_ids_of_a_canonical_conversation_are_those_of_its_rendered_text(families, name, turns):
    family, shape = families[name], SHAPES[name]
    end = family.stop_tokens[0]
    messages = (Message("user", turns[0][0]),)
    ids = family.start(messages).tokens
    for said, answered in turns:
        ids += (*family.encode(shape.space + said), end)
        messages += (Message("assistant", said),)
        appended = (Message("user", answered),)
        ids += family.delta(messages, appended, end).tokens
        messages += appended
    text = family.text(messages)
    assert family.decode(ids, skip_special=False) == text
    # Elsewhere the generation prompt runs into the turn, and one tokenization of both merges across the seam.
    assert name not in ("qwen", "mistral", "gemma") or ids == family.encode(text)


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sampled_ids_are_never_encoded_again(families, name, data):
    """Ids outside the canonical tokenization, thoughts and stray special tokens: what follows a turn is the same."""
    family = families[name]
    sampled = data.draw(st.lists(st.integers(0, family.vocab_size - 1), max_size=12))
    ended = data.draw(st.booleans())
    last = family.stop_tokens[0] if ended else 100
    before, appended = (Message("user", "help"),), (Message("user", data.draw(PLAIN)),)
    whole = family.start(before).tokens
    text = family.decode((*sampled, last))
    turn = (*before, Message("assistant", text))
    following = family.delta(turn, appended, last).tokens
    plain = family.delta((*before, Message("assistant", "abc")), appended, last).tokens
    row = (*whole, *sampled, last, *following)
    assert following == plain
    assert row[len(whole) : len(whole) + len(sampled) + 1] == (*sampled, last)
    assert family.decode(following).count(appended[0].text) >= 1
    assert (following[0] == family.stop_tokens[0]) == (not ended)


@pytest.mark.parametrize("name", SHAPES)
def test_every_end_of_a_turn_stops_and_none_is_repeated(families, name):
    family = families[name]
    assert [family.decode([token], skip_special=False) for token in family.stop_tokens][
        : len(SHAPES[name].ends)
    ] == list(SHAPES[name].ends)
    before, appended = (Message("user", "a"), Message("assistant", "b")), (Message("user", "c"),)
    assumed = family.delta(before, appended).tokens
    assert all(family.delta(before, appended, stop).tokens == assumed for stop in family.stop_tokens)
    cut = family.delta(before, appended, 200).tokens
    assert cut[-len(assumed) :] == assumed
    assert cut[0] == family.stop_tokens[0]


def test_a_turn_that_ends_with_the_next_speaker_is_not_followed_by_it_twice(tmp_path):
    roles = ("<|user|>", "<|assistant|>", "<|observation|>", "<|end|>")
    shape = Shape(GLM, roles, "", "<|end|>", ("<|end|>", "<|user|>", "<|observation|>"))
    family = open_family(write_model(tmp_path, shape))
    user, observation = (family.encode(role)[0] for role in ("<|user|>", "<|observation|>"))
    before = (Message("user", "a"), Message("assistant", "b"))
    spoken = family.delta(before, (Message("user", "c"),), user).tokens
    shown = family.delta(before, (Message("observation", "c"),), user).tokens
    assert family.decode(spoken, skip_special=False) == "\nc<|assistant|>\n"
    assert family.decode(shown, skip_special=False) == "<|observation|>\nc<|assistant|>\n"
    assert family.delta(before, (Message("observation", "c"),), observation).tokens == spoken


def test_a_trained_turn_has_one_end_also_if_the_template_writes_none_or_more(tmp_path):
    roles = ("<|user|>", "<|assistant|>", "<|end|>", "<|eos|>")
    family = open_family(write_model(tmp_path, Shape(GLM, roles, "", "<|end|>", ("<|end|>", "<|eos|>"))))
    asked, answered = (Message("user", "a"),), Message("assistant", "b")
    ended = (*family.encode("b"), family.stop_tokens[0])
    assert family.turn(asked, answered) == family.turn("a", answered) == ended
    rewriting = GLM + "{{ messages | length }}"  # the text before a turn differs from the text that begins the turn
    assert open_family(tmp_path, chat_template=rewriting).turn(asked, answered) == ended
    for more in ("<|end|>", "<|end|>\n", "<|end|><|eos|>", "<|end|>\n<|user|>"):
        writing = GLM.replace("{%- endfor %}", "{% if m.role == 'assistant' %}" + more + "{% endif %}{% endfor %}")
        writing = open_family(tmp_path, chat_template=writing)
        assert writing.turn(asked, answered) == writing.turn(asked, Message("assistant", "b<|end|>")) == ended
        with pytest.raises(ConfigError, match=r"words after <\|end\|>, which ends a turn"):
            writing.turn(asked, Message("assistant", "b<|end|>c"))


def test_words_after_a_turn_are_not_tokenized_as_the_beginning_of_a_text(tmp_path):
    """Tokenizers of the sentencepiece kind put a space before a text's first word only."""
    folder = write_model(
        tmp_path, Shape("{% for m in messages %}{{ m.content }}{% endfor %}", ("<s>", "</s>"), "<s>", "</s>", ("</s>",))
    )
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "b": 4}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    family = open_family(folder)
    assert family.start("b").tokens == (2, 4) and family.encode("b") == (4,)
    assert family.delta((Message("user", "a"), Message("assistant", "a")), (Message("user", "b"),)).tokens == (4,)


def test_a_thought_dropped_from_history_leaves_the_next_turn_alone(families):
    family = families["qwen"]
    asked = (Message("user", "a"),)
    thinking = (*asked, Message("assistant", "<think>\nhm\n</think>\n\nb"))
    following = family.delta(thinking, (Message("user", "c"),)).tokens
    assert family.decode(following, skip_special=False) == "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


def test_tool_answers_follow_in_the_form_of_the_template(families):
    family = families["qwen"]
    before = (Message("user", "a"), Message("assistant", "", (ToolCall("search", {"query": "x"}, "call00000"),)))
    following = family.delta(before, (Message("tool", "1"), Message("tool", "2"))).tokens
    answers = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert family.decode(following, skip_special=False) == (
        f"\n<|im_start|>user\n{answers}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_reach_the_template_as_schema_and_kwargs_as_variables(tmp_path):
    family = open_family(write_model(tmp_path, SHAPES["qwen"]), chat_template_kwargs={"enable_thinking": False})
    text = family.text((Message("user", "a & <b>"),), (Tool("search", {"query": str}, "Look up"),))
    assert '{"type": "function", "function": {"name": "search", "description": "Look up", ' in text
    assert '"properties": {"query": {"type": "string"}}, "required": ["query"]' in text
    assert text.endswith("a & <b><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_parts_of_text_are_joined_and_media_are_named_in_order(families):
    family = families["one-line"]
    words = Message("user", (Part("a"), Part("b")))
    assert family.start((words,)).tokens == family.encode("ab")
    seen = Message("user", (Part(media=Media("image", "x.png")), Part("a"), Part(media=Media("image", "y", key="k"))))
    assert family.start((seen,)).media == ("x.png", "k")


def test_a_bare_string_is_tokenized_without_a_template_after_the_opening_token(tmp_path):
    shape = SHAPES["llama"]
    write_model(tmp_path, shape)
    plain = open_family(tmp_path)
    assert plain.start("12+12=").tokens == plain.encode("12+12=")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|end|>", special_tokens=[("<|bos|>", bos), ("<|end|>", tokenizer.token_to_id("<|end|>"))]
    )
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = open_family(tmp_path)
    assert opened.start("12+12=").tokens == (bos, *plain.encode("12+12="))
    assert opened.start("<|bos|>12").tokens == (bos, *plain.encode("12"))
    settings_file = tmp_path / "tokenizer_config.json"
    settings_file.write_text(json.dumps({**json.loads(settings_file.read_text()), "add_bos_token": False}))
    assert open_family(tmp_path).start("12").tokens == plain.encode("12")


def test_a_template_is_taken_from_the_configuration_before_the_folder(tmp_path):
    write_model(tmp_path, SHAPES["one-line"])
    messages = (Message("user", "a"),)
    assert open_family(tmp_path).text(messages) == "a"
    (tmp_path / "chat_template.jinja").write_text("file:{{ messages[0].content }}")
    assert open_family(tmp_path).text(messages) == "file:a"
    (tmp_path / "mine.jinja").write_text("mine:{{ messages[0].content }}")
    assert open_family(tmp_path, chat_template=str(tmp_path / "mine.jinja")).text(messages) == "mine:a"
    assert open_family(tmp_path, chat_template="text:{{ messages[0].content }}").text(messages) == "text:a"


def test_a_template_for_tools_is_used_where_there_are_tools(tmp_path):
    write_model(tmp_path, SHAPES["one-line"])
    named = [
        {"name": "default", "template": "plain {{ messages[0].content }}"},
        {"name": "tool_use", "template": "tools {{ messages[0].content }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    family = open_family(tmp_path)
    assert family.text((Message("user", "a"),)) == "plain a"
    assert family.text((Message("user", "a"),), (Tool("t"),)) == "tools a"


def test_the_extensions_of_transformers_are_known(tmp_path):
    write_model(tmp_path, SHAPES["one-line"])
    template = (
        "{% for m in messages %}\n  {% if not m.content %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert open_family(tmp_path, chat_template=template).text((Message("system", ""), Message("user", "a"))) == "a4"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{% endfor %}", "0 times"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "2 times"),
        ("{{ raise_exception('no second turn') if messages | length > 1 }}", "no second turn"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_cannot_continue_is_named(tmp_path, template, said):
    write_model(tmp_path, SHAPES["one-line"])
    file = tmp_path / "odd.jinja"
    file.write_text(template)
    family = open_family(tmp_path, chat_template=str(file))
    with pytest.raises(ConfigError, match=said) as caught:
        family.delta((Message("user", "a"), Message("assistant", "b")), (Message("user", "c"),))
    assert "odd.jinja" in str(caught.value)
    assert caught.value.field == "model.chat_template"


def test_a_broken_template_is_refused_with_its_line(tmp_path):
    write_model(tmp_path, SHAPES["one-line"])
    with pytest.raises(ConfigError, match=r"line 2"):
        open_family(tmp_path, chat_template="{{ a }}\n{% for %}")
    with pytest.raises(ConfigError, match=r"gone\.jinja"):
        open_family(tmp_path, chat_template=str(tmp_path / "gone.jinja"))


def test_messages_for_a_model_without_a_template_are_refused_and_strings_are_not(tmp_path):
    write_model(tmp_path, SHAPES["one-line"])
    (tmp_path / "tokenizer_config.json").unlink()
    family = open_family(tmp_path)
    assert family.start("12").tokens == family.encode("12")
    with pytest.raises(ConfigError, match="without a chat template"):
        family.start((Message("user", "a"),))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_of_the_model_is_named(tmp_path, name):
    write_model(tmp_path, SHAPES["one-line"])
    (tmp_path / name).write_text("{ not json")
    with pytest.raises(ConfigError, match=name):
        open_family(tmp_path)


def test_a_missing_folder_or_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path.*nowhere"):
        open_family(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        open_family(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.tokenizer"):
        open_family(tmp_path, tokenizer=str(tmp_path / "gone"))


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 10**6), max_size=8), text=st.text(max_size=40))
def test_any_sampled_tokens_decode_and_parse(families, tokens, text):
    family = families["qwen"]
    assert isinstance(family.decode(tokens), str)
    search = (Tool("search", {"query": str}),)
    family.parse(tokens, search)
    family.parse(family.encode(text), search)
    kept, calls, error = family.parse(family.encode(f"<tool_call>{text}"), search)
    assert kept and not calls and error
