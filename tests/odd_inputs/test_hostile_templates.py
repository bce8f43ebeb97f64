# SPDX-License-Identifier: Apache-2.0
"""A chat template can't take more than bounded memory and time; ordinary templates render as in Jinja."""

from __future__ import annotations

import json
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from relax_plugin_chat import template_sandbox
from relax_plugin_chat.chat_template import ChatTemplate

from relax_core.api.errors import ConfigError
from relax_core.api.task import Message
from tests.chat.models import GEMMA, LLAMA, MISTRAL, QWEN

TEMPLATES = tomllib.loads((Path(__file__).parent / "hostile_templates.toml").read_text())["templates"]


DEEP = {
    "brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "loops": "{% for a in [1] %}" * 60 + "x" + "{% endfor %}" * 60,
    "conditions": "{% if 1 %}" * 300 + "x" + "{% endif %}" * 300,
    "filters": "{{ 1" + "|abs" * 3000 + " }}",
    "sums": "{{ 1" + "+1" * 3000 + " }}",
    "a long list": "{{ [" + "1," * 200_000 + "]|length }}",
}


@pytest.mark.parametrize("name", DEEP)
def test_a_template_that_can_not_be_compiled_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.chat_template: got t line 1: (Python can't compile|the template has more)"
    ):
        ChatTemplate(DEEP[name], "t", {}, datetime.now())


@pytest.mark.parametrize("text", TEMPLATES)
def test_a_template_that_takes_too_much_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_S", 1e9)  # the same on a slow machine and on a fast one
    monkeypatch.setattr(template_sandbox, "MAX_REPEATED", 1 << 17)
    monkeypatch.setattr(template_sandbox, "WORK", 4)
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        ChatTemplate(text, "t", {}, datetime.now()).render((Message("user", "x"),))


def test_a_rendering_ends_at_its_limit_of_processor_time_whatever_it_counts() -> None:
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        return 0.0 if looks < 4 else template_sandbox.MAX_S + 1

    template = template_sandbox.compiled("{% for a in range(99) %}{% endfor %}", {})
    with pytest.raises(jinja2.TemplateError, match="more work than a chat template needs"):
        template_sandbox.rendered(template, {}, clock)
    assert looks == 4, "one for the start, and one for each eight steps"


@pytest.mark.parametrize("text", [
    "{{ '%s and %5.1f%%' % ('a', 1.5) }}", "{{ '{:>8}|{a}'.format('x', a=1) }}", "{{ 'x'|center(20) ~ 1 ~ none }}",
    "{{ 'a\nb'|indent(4) }}", "{{ [1, (2, 3), {'a': [4]}] }}", "{{ messages|tojson(indent=2) }}", "{{ 10000000|string }}",
    "{{ missing|default(10000000) }}", "{{ messages|map(attribute='content')|join(', ') }}", "{{ '\t'.expandtabs() }}|",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.last }}{% else %}none{% endfor %}",
    "{% macro f(x, y=[1]) %}{{ x }}{{ y }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, 3, z=4) }}",
    "{% set n = namespace(all=[]) %}{% for m in messages %}{% set n.all = n.all + [m.content] %}{% endfor %}{{ n.all }}",
    "{% set a, b = 1, 'x' %}{{ a }}{{ b }}{% set t %}{{ a + 1 }}{% endset %}{{ t }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 'ab' * 3 }}",
    "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|first }}{{ [3, 1, 2]|reject('odd')|list }}",
    "{{ [[1], [2]]|sum(start=[]) }}{{ range(5)|reverse|list }}{{ [1, 2, 3]|batch(2)|map('sum')|list }}{{ ' a '|trim }}",
    "{{ {'a': 1}.keys()|list }}{{ ({'a': 1, 'b': 2}.keys() - ['b'])|list }}{{ 7 - 2.5 }}{{ messages[1:]|length }}",
    "{{ 1 < 2 <= 2 != 3 }}{{ 'he' in messages[0].content }}{{ messages[0] == messages[0] }}{{ 'x' not in [1, 2] }}",
    "{{ 'xx-x'.strip('x').rpartition('-') }}{{ 'a'.encode('utf-8') }}{{ [1, 2, 1].count(1) }}{{ [2, 1]|sort|first }}",
    "{% for k, g in messages|groupby('role') %}{{ k }}{{ g|length }}{% endfor %}{{ 'b'|unique|list }}{{ [1, 2]|max }}",
    "{{ messages[::-1][0].content.split('e')[0].strip().replace('h', 'H').upper() }}", "{{ ['b', 'a']|sort|list }}",
    "{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "{{ 'a' in ['a', b] }}",
    "{% call(x) f() %}{{ x }}{% endcall %}{% macro f() %}{{ caller(1) }}{% endmacro %}", "{{ joiner(', ')() }}",
])  # fmt: skip
def test_an_ordinary_expression_renders_as_in_jinja(text: str) -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}], "b": "b",
    }  # fmt: skip
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = json.dumps
    text = text.replace("{% call(x) f() %}", "{% macro f() %}{{ caller(1) }}{% endmacro %}{% call(x) f() %}")
    assert template_sandbox.rendered(template_sandbox.compiled(text, {}), fields) == plain.from_string(text).render(
        fields
    )


@pytest.mark.parametrize("text", [QWEN, LLAMA, MISTRAL, GEMMA])
def test_long_conversations_are_within_the_bounds(text: str) -> None:
    turns = [Message("user" if number % 2 == 0 else "assistant", "word " * 2000) for number in range(401)]
    shown = ChatTemplate(text, "t", {"bos_token": "<s>", "eos_token": "</s>"}, datetime.now()).render(turns)
    assert len(shown) > 400 * 9000


def test_one_message_of_millions_of_characters_is_within_the_bounds() -> None:
    shown = ChatTemplate(QWEN, "t", {}, datetime.now()).render((Message("user", "x" * 5_000_000),))
    assert len(shown) > 5_000_000
