# SPDX-License-Identifier: Apache-2.0
"""Build the recipe in a folder: pictures, tasks, conversations for the warm start, and a random model.

`python -m relax_contrib.recipes.zoom.build FOLDER --seed 0`. In about half of the conversations the assistant zooms
into the quarter that the question names, else into a different quarter. It always names the colour in the crop.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from relax_contrib.recipes import families
from relax_contrib.recipes.making import made
from relax_contrib.recipes.shown import save_picture
from relax_contrib.recipes.zoom.task import BOXES, WORDS, Scene, call, crop, draw, scene

NUM_TRAIN, NUM_EVAL, NUM_SHOWN = 768, 256, 1024
LOOKED_RIGHT = 0.3
"""Share of the conversations that zoom into the named quarter on purpose; the rest choose any quarter at random."""


def build(folder: Path, seed: int) -> None:
    """Write all files that the recipe's TOML names."""
    random = Random(f"zoom {seed}")
    scenes = [scene(random) for _ in range(NUM_TRAIN + NUM_EVAL)]
    for number, one in enumerate(scenes):
        save_picture(draw(one), folder / f"pictures/{number:05}.png")
    rows = [
        {"prompt": [_asked(f"pictures/{number:05}.png", one)], "answer": one.answer}
        for number, one in enumerate(scenes)
    ]
    _write(folder / "train.jsonl", rows[:NUM_TRAIN])
    _write(folder / "eval.jsonl", rows[NUM_TRAIN:])
    _write(folder / "shown.jsonl", [_conversation(folder, f"{number:05}.png", random) for number in range(NUM_SHOWN)])
    families.save_tokenizer(WORDS, folder / "model")
    families.build_model("qwen3_vl", seed, len(families.SPECIAL) + len(WORDS)).save_pretrained(folder / "model")


def _conversation(folder: Path, name: str, random: Random) -> dict[str, Any]:
    shown = scene(random)
    quarter = shown.asked if random.random() < LOOKED_RIGHT else random.choice(list(BOXES))
    pixels = draw(shown)
    save_picture(pixels, folder / "shown" / name)
    save_picture(crop(pixels, quarter), folder / "crops" / name)
    return {
        "messages": [
            _asked(f"shown/{name}", shown),
            {"role": "assistant", "content": call(quarter)},
            {"role": "tool", "content": [{"type": "image", "image": f"crops/{name}"}]},
            {"role": "assistant", "content": shown.colours[quarter]},
        ]
    }


def _asked(picture: str, scene: Scene) -> dict[str, Any]:
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": scene.question}]
    return {"role": "user", "content": parts}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    made(build, __doc__)
