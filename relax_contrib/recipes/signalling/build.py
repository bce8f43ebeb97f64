# SPDX-License-Identifier: Apache-2.0
"""Build the recipe in a folder: a task for each meaning, turns of both roles for the warm start, and a random model.

`python -m relax_contrib.recipes.signalling.build FOLDER --seed 0`. In the warm start, speakers say random signals and
listeners name random meanings. This teaches which words each role may say; signals have no meaning yet.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from relax_contrib.recipes import families
from relax_contrib.recipes.making import made
from relax_contrib.recipes.quickstart import model as tiny

MEANINGS = ("fox", "owl", "bee", "cow", "hen", "ant", "bat", "eel")
SIGNALS = ("ba", "do", "ga", "ki", "lu", "mo", "ne", "pa")
SPEAKER, LISTENER = "say {}", "hear {}"
WORDS = (*MEANINGS, *SIGNALS, SPEAKER.split()[0], LISTENER.split()[0])
NUM_SHOWN = 96
"""Number of rows of the warm start; few, so that chance leaves each prompt a slight preference for some signals.

With equally likely signals no gradient distinguishes them."""


def build(folder: Path, seed: int) -> None:
    """Write all files that the recipe's TOML names."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "tasks.jsonl", [{**_asked(SPEAKER.format(one)), "answer": one} for one in MEANINGS])
    random = Random(f"signalling {seed}")
    shown = [
        {**_asked(prompt.format(random.choice(heard))), "completion": random.choice(said)}
        for prompt, heard, said in [(SPEAKER, MEANINGS, SIGNALS), (LISTENER, SIGNALS, MEANINGS)] * (NUM_SHOWN // 2)
    ]
    _write(folder / "shown.jsonl", shown)
    families.save_tokenizer(WORDS, folder / "model")
    tiny.build_model(seed, len(families.SPECIAL) + len(WORDS)).save_pretrained(folder / "model")


def _asked(prompt: str) -> dict[str, object]:
    return {"prompt": [{"role": "user", "content": prompt}]}


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    made(build, __doc__)
