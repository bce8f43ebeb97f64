# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that put a space before a text: the tokens of the pieces are those of the whole text, and no space is lost."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pytest
from relax_plugin_chat.chat import ChatFamily
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from relax_core.api.family import Rendered
from relax_core.api.role import SystemClock
from relax_core.api.task import Message, Task
from relax_core.data.dataset import example
from relax_core.data.row_proof import example_faults
from relax_core.engines.model_client import PoolModelClient
from relax_core.engines.requests import stop_end
from relax_core.sampling.first_samples import task_facts
from relax_core.sampling.session import Branch, Limits, Sample

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
CHARACTERS = "0123456789+=abcdefghijklmnopqrstuvwxyz[]/INSTSYU<>|!?."
MARKS = ("<s>", "</s>", "<|user|>", "<|assistant|>")


def unigram() -> models.Unigram:
    pieces = [("<unk>", 0.0), *((mark, 0.0) for mark in MARKS), (SPACE, -2.0)]
    pieces += [(character, -4.0) for character in dict.fromkeys(CHARACTERS)]
    pieces += [(SPACE + character, -4.5) for character in "24a["] + [(SPACE * 2, -2.5)]
    return models.Unigram(pieces + [(f"<0x{byte:02X}>", -9.0) for byte in range(256)], 0, True)


def bpe() -> models.BPE:
    merges = [(SPACE, character) for character in "24a["] + [(SPACE, SPACE)]
    pieces = ["<unk>", *MARKS, SPACE, *dict.fromkeys(CHARACTERS), *map("".join, merges)]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def tokenizer_of(layout: str, model: Any) -> Tokenizer:
    """Return a tokenizer whose steps are those of the files of Llama 2 and Mistral (legacy or not), T5 or GPT-2."""
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    steps: list[Any] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    if layout == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=layout.split()[0], split="split" in layout)
    if "split" in layout:
        steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=layout.split()[0])]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


TEMPLATES = {
    "llama2": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "plain": (
        "{{ bos_token }}{% for m in messages %}{{ m.role + '=' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant={% endif %}"
    ),
    "marks": (
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}
LAYOUTS = [(layout, model) for layout in ("legacy", "first", "always", "first split") for model in ("bpe", "unigram")]


@pytest.fixture(scope="module", params=LAYOUTS, ids=" ".join)
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout, model = request.param
    path = tmp_path_factory.mktemp("model")
    tokenizer_of(layout, {"bpe": bpe, "unigram": unigram}[model]()).save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def opened(folder: Path, template: str = "plain") -> tuple[ChatFamily, Tokenizer]:
    family = ChatFamily()
    family.open({"path": str(folder), "chat_template": TEMPLATES[template]})
    return family, Tokenizer.from_file(str(folder / "tokenizer.json"))


def whole(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("answer", ["4", " 4", "  4", "    a b", "\n4", "4 ", "é4", "a</s>"])
def test_a_plain_answer_is_encoded_as_in_the_whole_text(folder: Path, answer: str) -> None:
    family, tokenizer = opened(folder)
    bos, eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    made = example(family, "2+2=", answer)
    text = answer.removesuffix("</s>")
    assert made.tokens == (bos, *whole(tokenizer, "2+2=" + text), eos)
    trained = [token for token, mask in zip(made.tokens, made.mask, strict=True) if mask]
    assert family.decode(trained) == text == family.parse(trained)[0]
    assert family.decode(family.encode(text)) == text
    assert [*example_faults(family, "2+2=", answer, (), made.tokens, made.mask)] == []


def test_a_text_that_begins_with_the_answer_begins_as_the_tokenizer_begins_it(folder: Path) -> None:
    family, tokenizer = opened(folder)
    assert example(family, "", "2").tokens == (*family.start("2").tokens, family.stop_tokens[0])
    assert family.start("2").tokens[1:] == whole(tokenizer, "2")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("answer", ["4", "a b"])
def test_the_turns_of_a_chat_are_encoded_as_in_the_whole_text(folder: Path, template: str, answer: str) -> None:
    family, tokenizer = opened(folder, template)
    messages = (Message("user", "2+2"), Message("assistant", answer), Message("user", "a"), Message("assistant", "2"))
    said = family.turn(messages[:1], messages[1])
    tokens = family.start(messages[:1]).tokens + said + family.delta(messages[:2], messages[2:3], said[-1]).tokens
    tokens += family.turn(messages[:3], messages[3])
    given = {"messages": [{"role": one.role, "content": one.text} for one in messages]}
    text = jinja2.Template(TEMPLATES[template]).render(bos_token="<s>", eos_token="</s>", **given)
    assert tokens == whole(tokenizer, text)
    assert family.parse(said)[0].strip() == answer
    assert task_facts(Task("t", messages[:3]), (), family, family)["prompt_faults"] == []
    made = example(family, messages, None)
    assert made.tokens == tokens and [*example_faults(family, messages, None, (), made.tokens, made.mask)] == []
    ended, cut = (family.delta(messages[:2], messages[2:3], last).tokens for last in (None, family.encode("a")[0]))
    assert cut[len(cut) - len(ended) :] == ended


def test_texts_that_begin_with_a_space_stop_a_turn_and_are_seen_as_they_grow(folder: Path) -> None:
    family, _ = opened(folder)
    tokens = family.encode(" a4 2")
    assert stop_end(tokens, (" a",), family.decode) is not None
    grown = [family.parse_beginning(tokens[:count]) for count in range(len(tokens) + 1)]
    assert grown[0] == "" and grown[-1] == " a4 2"
    assert all(later.startswith(sooner) for sooner, later in zip(grown, grown[1:], strict=False))


def test_observations_after_a_plain_prompt_are_encoded_as_in_the_whole_text(folder: Path) -> None:
    family, tokenizer = opened(folder)
    for prompt, more in (("2+2", "=4"), ("", "2+2")):
        sample = Sample(family, None, Limits(4), lambda observation: ())  # type: ignore[arg-type]
        branch = Branch(sample, prompt, Rendered(family.start(prompt).tokens), 0)
        branch.append((Message("user", more),))
        branch.begin()
        assert sample.forest[0].tokens == (tokenizer.token_to_id("<s>"), *whole(tokenizer, prompt + more))


@pytest.mark.parametrize(("prompt", "answer"), [("2+2=", " 4"), ((Message("user", "2+2"),), "4")])
def test_the_proof_of_a_row_finds_a_space_and_a_word_that_the_row_does_not_have(
    folder: Path, prompt: Any, answer: str
) -> None:
    family, tokenizer = opened(folder)
    made = example(family, prompt, answer)
    given = made.mask.index(1)
    proof = partial(example_faults, family, prompt, answer, ())
    assert [*proof(made.tokens, made.mask)] == []
    space = tokenizer.token_to_id(SPACE)
    (fault,) = proof((*made.tokens[:given], space, *made.tokens[given:]), (*made.mask[:given], 1, *made.mask[given:]))
    assert fault.startswith("the tokens of the whole text read")
    lost = proof((*made.tokens[:given], *made.tokens[-1:]), (*made.mask[:given], 1))
    assert [text[:20] for text in lost] == ["the tokens leave out", "the trained tokens r"]
    untrained = proof(made.tokens, (*made.mask[:given], 0, *made.mask[given + 1 :]))
    assert any("without words of" in fault for fault in untrained) or answer == " 4"


class Pool:
    """An engine pool that keeps the sequences to score."""

    async def score(self, sequences: list[tuple[int, ...]], temperature: float) -> list[list[float]]:
        self.sequences = sequences
        return [[0.0] * len(sequence) for sequence in sequences]


def test_completions_are_scored_as_parts_of_the_whole_text(folder: Path) -> None:
    family, tokenizer = opened(folder)
    pool: Any = Pool()
    client = PoolModelClient("judge", pool, family, SystemClock(), 60.0)
    for prompt, completion in (("2+2=", "4"), ("", "2+2=")):
        asyncio.run(client.score(prompt, [completion]))
        assert pool.sequences == [(tokenizer.token_to_id("<s>"), *whole(tokenizer, prompt + completion))]
