# SPDX-License-Identifier: Apache-2.0
"""Build the recipe in a folder: corpus, tasks, conversations for the warm start, and a random model.

`python -m relax_contrib.recipes.search.build FOLDER --seed 0`. The conversations search for two random words of the
question and answer with a random fact of the result. They teach the form of a call and the copying of words.
Reinforcement learning must find out which words to search for and which fact is the answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from relax_contrib.recipes import families
from relax_contrib.recipes.making import made
from relax_contrib.recipes.quickstart import model as tiny
from relax_contrib.recipes.search.task import FACTS, WORDS, Person, call, people

CONVERSATIONS = 4096
QUERY_WORDS = 2
NUM_EVAL = 256


def build(folder: Path, seed: int) -> None:
    """Write all files that the recipe's TOML names."""
    folder.mkdir(parents=True, exist_ok=True)
    found = people(seed)
    everybody = sorted([*found.train, *found.held_out])
    _write(folder / "corpus.jsonl", [{"text": person.text} for person in everybody])
    _write(folder / "train.jsonl", [_task(person, kind) for person in found.train for kind in FACTS])
    _write(folder / "eval.jsonl", [_task(person, kind) for person in found.held_out for kind in FACTS][:NUM_EVAL])
    random = Random(f"search warm start {seed}")
    _write(folder / "shown.jsonl", [_conversation(found.train, random) for _ in range(CONVERSATIONS)])
    families.save_tokenizer(WORDS, folder / "model")
    tiny.build_model(seed, len(families.SPECIAL) + len(WORDS)).save_pretrained(folder / "model")


def _task(person: Person, kind: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": person.question(kind)}], "answer": person.facts[kind]}


def _conversation(asked: list[Person], random: Random) -> dict[str, Any]:
    """Return a conversation with random choices: two words to search for, and a fact about a person with these names."""
    person, kind = random.choice(asked), random.choice(list(FACTS))
    query = random.sample([kind, *person.name.split()], QUERY_WORDS)
    names = set(query) & set(person.name.split())
    found = random.choice([one for one in asked if names <= set(one.name.split())])
    said = [
        ("user", person.question(kind)), ("assistant", call(" ".join(query))), ("tool", found.text),
        ("assistant", random.choice(list(found.facts.values()))),
    ]  # fmt: skip
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    made(build, __doc__)
