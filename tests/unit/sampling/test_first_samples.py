# SPDX-License-Identifier: Apache-2.0
"""The facts about the first tasks: a model's own template and tokenizer have no fault, and those of another model do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
from relax_plugin_chat.chat import ChatFamily

from relax_contrib.recipes.quickstart.model import CHARACTERS, save_tokenizer
from relax_core.api.errors import ConfigError
from relax_core.api.family import ModelFamily
from relax_core.api.task import Message, Task
from relax_core.api.trajectory import Outcome, Trajectory
from relax_core.rewards.host import ScoredSample
from relax_core.rewards.scorer import RewardScorer
from relax_core.sampling.first_samples import answer_facts, own_tokenizer, stops, task_facts, tokenizer_facts
from tests.chat.models import QWEN, SHAPES, open_family, write_model
from tests.chat.tool_templates import TEMPLATES, open_family as open_with_marks

CHAT = (Message("system", "help the user:"), Message("user", "  12+12=\n\nhelp "))
ASKED = Task("t1", (Message("user", "12+12="),))


@pytest.mark.parametrize("name", SHAPES)
def test_a_models_own_template_writes_what_its_tokens_read_and_ends_turns_with_its_stop_token(
    name: str, tmp_path: Path
) -> None:
    family = open_family(write_model(tmp_path, SHAPES[name]))
    for task in (ASKED, Task("t2", CHAT)) if name in ("qwen", "llama", "one-line") else (ASKED,):
        found = task_facts(task, (), family)
        assert found["prompt_faults"] == [] and found["other_ids"] is None
        assert (found["turn_end"], found["split_marks"]) == (SHAPES[name].ends[0], [])
    assert stops(family)[0] == (family.stop_tokens[0], SHAPES[name].ends[0])
    assert "turn_end" not in task_facts(Task("t3", "12+12="), (), family), "a bare string has no turns"


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_template_of_a_known_format_has_a_fault(name: str, tmp_path: Path) -> None:
    _, template, end = TEMPLATES[name]
    found = task_facts(ASKED, (), open_with_marks(tmp_path, template, end))
    assert found["prompt_faults"] == [] and bool(found["turn_end"]) == (name != "glm"), "glm begins a turn with its end"


def test_the_token_that_begins_the_next_turn_may_end_a_turn(tmp_path: Path) -> None:
    family = open_with_marks(tmp_path, TEMPLATES["glm"][1], "<|user|>", ("<|assistant|>",))
    assert task_facts(ASKED, (), family)["turn_end"] == "<|user|>"


def test_a_template_that_drops_the_end_of_the_policys_turn_is_told_from_the_users_end(tmp_path: Path) -> None:
    folder = write_model(tmp_path, SHAPES["qwen"])
    every = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    dropping = every.replace("<|im_end|>", "{% if m.role != 'assistant' %}<|im_end|>{% endif %}")
    sound = task_facts(ASKED, (), open_family(folder, chat_template=every))
    assert (sound["turn_end"], sound["user_end"]) == ("<|im_end|>", "<|im_end|>")
    found = task_facts(ASKED, (), open_family(folder, chat_template=dropping))
    assert (found["turn_end"], found["user_end"]) == ("", "<|im_end|>")


def test_a_tokenizer_whose_text_is_the_models_end_is_another_models(tmp_path: Path) -> None:
    folder = write_model(tmp_path, SHAPES["qwen"])
    own = open_family(folder)
    assert tokenizer_facts(own) == {"tokens": own.vocab_size, "foreign": 0, "misread_ends": []}
    (word,) = own.encode("=")
    for ids, misread in (([word, 9999], [(word, "="), (9999, "")]), ([word, own.stop_tokens[1]], []), ([], [])):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        assert tokenizer_facts(open_family(folder))["misread_ends"] == misread
    (folder / "config.json").write_text(json.dumps({"vocab_size": own.vocab_size - 5}))
    assert tokenizer_facts(open_family(folder))["foreign"] == 5


def test_the_template_of_another_model_is_split_into_many_tokens(tmp_path: Path) -> None:
    family = open_family(write_model(tmp_path, SHAPES["mistral"]), chat_template=QWEN)
    found = task_facts(ASKED, (), family)
    assert found["turn_end"] == "" and found["closing"].startswith("<|im_end|>")
    assert [mark for mark, _ in found["split_marks"]] == ["<|im_start|>", "<|im_end|>"]
    assert all(count > 1 for _, count in found["split_marks"])
    said = Task("t4", (Message("user", "what is <|im_start|> ?"),))
    assert "<|im_start|>" not in [mark for mark, _ in task_facts(said, (), family)["split_marks"]], "the user wrote it"


def test_what_a_tokenizer_cannot_spell_and_what_a_template_leaves_out_are_quoted(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (unspelt,) = task_facts(Task("t1", "s12Ω34="), (), open_family(tmp_path))["prompt_faults"]
    assert unspelt == "the template wrote 's12Ω34=', and its tokens read 's12<unk>34='"
    alone = open_family(tmp_path, chat_template="{{ messages[-1].content }}")
    with pytest.raises(ConfigError, match="leaves out words of a message of 'system': 'be brief'"):
        task_facts(Task("t2", (Message("system", "be brief"), Message("user", "12"))), (), alone)


def test_another_tokenizer_is_compared_with_the_model_folders_own(tmp_path: Path) -> None:
    for name, characters in (("model", CHARACTERS), ("other", CHARACTERS[::-1])):
        (tmp_path / name).mkdir()
        save_tokenizer(tmp_path / name, characters)
    model, other = tmp_path / "model", tmp_path / "other"
    family = open_family(model, tokenizer=str(other))
    assert own_tokenizer(family, model, None) is None and own_tokenizer(family, tmp_path, other) is None
    task = Task("t1", "s21=")
    foreign = task_facts(task, (), family, own_tokenizer(family, model, other))
    assert foreign["other_ids"] == "token 0 is 11 for 's' instead of 49" and foreign["prompt_faults"] == []
    assert task_facts(task, (), open_family(model), own_tokenizer(family, model, model))["other_ids"] == ""


def test_a_family_without_a_text_of_its_own_is_judged_by_the_text_of_its_tokens(tmp_path: Path) -> None:
    class Textless(ChatFamily):
        text = ModelFamily.text

    save_tokenizer(tmp_path)
    family = Textless()
    family.open({"path": str(tmp_path)})
    assert task_facts(Task("t1", "s12Ω34="), (), family)["prompt_faults"] == []
    assert type(own_tokenizer(family, tmp_path, tmp_path)) is Textless, "another tokenizer is read as the run's own"


class Scripted:
    """Pays what it was told for each answer."""

    def __init__(self, **pays: float | None) -> None:
        self.pays = pays

    async def answers(self, tasks: list[Task]) -> list[float | None]:
        return [self.pays[task.id] for task in tasks]


def played(task: Task, **earned: float) -> tuple[Task, list[Trajectory], list[ScoredSample]]:
    samples = [Trajectory((), response, ()) for response in earned]
    return task, samples, [ScoredSample(value) for value in earned.values()]


def test_an_answer_is_compared_with_the_best_judged_sample() -> None:
    failed = Trajectory((), "", (), Outcome.ENGINE_ERROR)
    paid = Trajectory((), "moves", (), step_rewards=(1.0,))
    groups: list[Any] = [
        played(Task("right", "p", 12), wrong=0.0, better=0.5),
        played(Task("without", "p"), any=1.0),
        (Task("failed", "p", "a"), [failed], [ScoredSample(0.0, outcome=Outcome.ENGINE_ERROR)]),
        (Task("game", "p", "a"), [paid], [ScoredSample(1.0)]),
        played(Task("unread", "p", "a"), any=1.0),
    ]
    scorer = cast(RewardScorer, Scripted(right=1.0, unread=None))
    found = asyncio.run(answer_facts(scorer, groups))
    assert found == [{"text": "12", "earned": 1.0, "best": 0.5, "response": "better"}, None, None, None, None]
