# SPDX-License-Identifier: Apache-2.0
"""Builds the recipe in a folder: pictures, tasks, and a model warmed up until it is right a little more often than by chance.

`python -m relax_contrib.recipes.colours.build FOLDER --seed 0`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

from relax_contrib.recipes.colours import model as tiny
from relax_contrib.recipes.colours.task import QUESTION, SIDE, Item, split, write
from relax_contrib.recipes.making import made

TARGET = 0.35
"""Chance is 0.25."""
BATCH, RATE, WARMUP_STEPS, MAX_STEPS, CHECK_EVERY = 32, 1e-3, 20, 200, 4


def build(folder: Path, seed: int) -> float:
    """Everything the recipe's TOML names; returns the sampled pass rate of the warm start."""
    items = split(folder, seed)
    write(items.train, folder / "train.jsonl")
    write(items.held_out, folder / "eval.jsonl")
    tokenizer, processor = tiny.save_tokenizer(folder / "model"), tiny.save_processor(folder / "model", SIDE)
    policy = tiny.build_model(seed)
    reached = warm_up(
        policy, Shown(folder, tokenizer, processor), items.train, items.check, Random(f"warm start {seed}")
    )
    policy.save_pretrained(folder / "model")
    return reached


class Shown:
    """Items as the model reads them."""

    def __init__(self, folder: Path, tokenizer: Any, processor: Any) -> None:
        self._folder, self._processor = folder, processor
        self._question = tokenizer.encode(QUESTION).ids
        self._id = tokenizer.token_to_id

    def inputs(self, items: list[Item], answered: bool) -> dict[str, Any]:
        """All of one length: pictures are of one size and answers one word."""
        import torch
        from PIL import Image

        seen = self._processor(images=[Image.open(self._folder / item.picture) for item in items], return_tensors="pt")
        tokens = int(seen["image_grid_thw"][0].prod()) // tiny.MERGE**2
        prompt = [tiny.VISION_START, *[tiny.IMAGE] * tokens, tiny.VISION_END, *self._question]
        rows = [prompt + ([self._id(item.answer), tiny.EOS] if answered else []) for item in items]
        ids = torch.tensor(rows)
        return {"input_ids": ids, "mm_token_type_ids": (ids == tiny.IMAGE).long(), **seen}


def warm_up(policy: Any, shown: Shown, train: list[Item], check: list[Item], random: Random) -> float:
    """Supervised steps until the sampled pass rate on `check` reaches the target."""
    import torch

    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    reached = 0.0
    for step in range(1, MAX_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / WARMUP_STEPS)
        inputs = shown.inputs(random.choices(train, k=BATCH), answered=True)
        logits = policy(**inputs).logits[:, -3:-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["input_ids"][:, -2:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % CHECK_EVERY == 0:
            reached = pass_rate(policy, shown, check)
            print(f"warm start: step {step}, {reached:.0%} of sampled answers right", file=sys.stderr, flush=True)
            if reached >= TARGET:
                break
    return reached


def pass_rate(policy: Any, shown: Shown, items: list[Item]) -> float:
    """Chance that a sampled answer is the right word and then ends."""
    import torch

    with torch.no_grad():
        inputs = shown.inputs(items, answered=True)
        log_probs = policy(**inputs).logits[:, -3:-1].log_softmax(-1)
    said = log_probs.gather(-1, inputs["input_ids"][:, -2:, None]).squeeze(-1).sum(1)
    return float(said.exp().mean())


def main() -> None:
    reached = made(build, __doc__)
    if reached < TARGET:
        sys.exit(f"colours: the warm start ended at {reached:.0%}, below {TARGET:.0%}; try another --seed")


if __name__ == "__main__":
    main()
