# SPDX-License-Identifier: Apache-2.0
"""Build the recipe in a folder: repositories, the agent and its judge, repairs for the warm start, and a random model.

`python -m relax_contrib.recipes.repair.build FOLDER --seed 0`. The warm start's conversations have valid commands and
their real output. Some steps are an expert's: run the test, read the module that it names, make the code do what the
comment says. The remaining steps are random: no test, another module, another operation. Reinforcement learning must
find out which steps lead to a repair.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

from relax_contrib.recipes import families
from relax_contrib.recipes.making import made
from relax_contrib.recipes.quickstart import model as tiny
from relax_contrib.recipes.repair.agent import NOTHING
from relax_contrib.recipes.repair.task import (
    OPERATIONS,
    PHRASES,
    RUN_TEST,
    SIZE,
    SUBMIT,
    WORDS,
    Repository,
    edit,
    file_of,
    look,
    shown,
    split,
)

NUM_TRAIN, NUM_EVAL, NUM_SHOWN = 2048, 128, 24576
HIDDEN_CASES = 3
"""Number of hidden cases for each module."""
TESTED, FOLLOWED, READ, CHECKED = 0.7, 0.6, 0.75, 0.2
"""Shares of the repairs that run the test first, read the module that it names, follow the comment, and test again."""


def build(folder: Path, seed: int) -> None:
    """Write all files that the recipe's TOML names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("agent.py", "judge.py"):
        shutil.copyfile(Path(__file__).with_name(name), folder / name)
    train, held_out = split(seed, NUM_TRAIN, NUM_EVAL)
    random = Random(f"repair warm start {seed}")
    _write(folder / "train.jsonl", [_task(one, random) for one in train])
    _write(folder / "eval.jsonl", [_task(one, random) for one in held_out])
    seen = [train[number % NUM_TRAIN] for number in range(NUM_SHOWN)]
    _write(folder / "shown.jsonl", [{"messages": repair(one, random)} for one in seen])
    words = (*WORDS, NOTHING)
    families.save_tokenizer(words, folder / "model", PHRASES)
    tiny.build_model(seed, len(families.SPECIAL) + len(words) + len(PHRASES)).save_pretrained(folder / "model")


def repair(one: Repository, random: Random) -> list[dict[str, str]]:
    """Return a conversation for the warm start: expert or random steps, with the real output of each command."""
    said = [one.question]
    place = random.randrange(SIZE)
    if random.random() < TESTED:
        said += [RUN_TEST, _tested(one)]
        if random.random() < FOLLOWED:
            place = one.broken
    old = one.operation(place)
    said += [look(one.modules[place]), shown(one.code(place))]
    new = one.asked[place]
    if new == old or random.random() >= READ:
        new = random.choice([operation for operation in OPERATIONS if operation != old])
    said += [edit(one.modules[place], old, new), NOTHING]
    if random.random() < CHECKED:
        is_right = place == one.broken and new == one.asked[place]
        said += [RUN_TEST, "OK" if is_right else _tested(one, also_broken=place)]
    said.append(SUBMIT)
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]


def _tested(one: Repository, also_broken: int = SIZE) -> str:
    """Return the output of the test, which names the first wrong module."""
    return f"FAIL {file_of(one.modules[min(one.broken, also_broken)])}"


def _task(one: Repository, random: Random) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": one.question}],
        "files": one.files(random),
        "judge_files": {"cases.json": json.dumps(one.cases(HIDDEN_CASES, random))},
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    made(build, __doc__)
