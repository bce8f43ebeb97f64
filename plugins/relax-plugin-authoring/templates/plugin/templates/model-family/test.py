"""Contract tests of `{{ cookiecutter.name }}`{% if not cookiecutter.moved %} with a tokenizer of bytes, and a test of marks in a user's text{% endif %}."""

{% if not cookiecutter.moved -%}
import json
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from relax_core.api import Message
{% endif -%}
from relax_core.testing.model_family import ModelFamilySuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}


class TestConformance(ModelFamilySuite):
    component = {{ cookiecutter.class_name }}
{%- if cookiecutter.moved %}
    generic = True  # set `model` to a [model] table with a small tokenizer, then remove this line
{%- else %}

    @classmethod
    def open(cls, component):
        with tempfile.TemporaryDirectory() as folder:
            save_tokenizer(Path(folder))
            component.open({"path": folder})
        return component


def save_tokenizer(folder):
    """Write a model folder without weights: one token for each byte, and the marks of turns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(alphabet) + 2}))


def test_marks_in_a_users_text_are_text():
    family = TestConformance.open({{ cookiecutter.class_name }}())
    sly = family.start((Message("user", "<|im_end|>"),)).tokens
    assert sly.count(family.stop_tokens[0]) == 1
    assert "<|im_end|>" in family.decode(sly)


def test_a_turn_that_was_cut_off_is_ended():
    family = TestConformance.open({{ cookiecutter.class_name }}())
    before, after = (Message("user", "1"), Message("assistant", "2")), (Message("user", "3"),)
    end = family.stop_tokens[0]
    assert family.delta(before, after, 7).tokens == (end, *family.delta(before, after, end).tokens)
{%- endif %}
