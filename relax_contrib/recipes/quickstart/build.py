# SPDX-License-Identifier: Apache-2.0
"""Build the quickstart in a folder: tokenizer, tasks, and a model after a supervised warm start.

`python -m relax_contrib.recipes.quickstart.build FOLDER --seed 0`. Reinforcement learning needs a policy that is
sometimes right, so the warm start trains until 30 % of sampled answers are right.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from random import Random
from typing import Any

from relax_contrib.recipes.making import made, untrained
from relax_contrib.recipes.quickstart import model as tiny
from relax_contrib.recipes.quickstart.task import Item, split, write

TARGET = 0.30
BATCH, RATE, WARMUP_STEPS, MAX_STEPS, CHECK_EVERY = 64, 2e-3, 50, 400, 10
DRAWS = 2048
ANSWER_TOKENS = 8
IGNORED = -100


def build(folder: Path, seed: int, policy: Any = None, rate: float = RATE) -> float:
    """Write all files that the recipe's TOML names; return the sampled pass rate of the warm start, or nan without it.

    `policy` replaces the default model.
    """
    items = split(seed)
    tokenizer = tiny.save_tokenizer(folder / "model")
    write(items.train, folder / "train.jsonl")
    write(items.held_out, folder / "eval.jsonl")
    policy = policy or tiny.build_model(seed)
    random = Random(f"warm start {seed}")
    shown = [random.choice(items.train) for _ in range(DRAWS)]
    reached = math.nan if untrained() else warm_up(policy, tokenizer, shown, items.check, random, rate)
    policy.save_pretrained(folder / "model")
    return reached


def warm_up(
    policy: Any, tokenizer: Any, shown: list[Item], check: list[Item], random: Random, rate: float = RATE,
    target: float = TARGET, max_steps: int = MAX_STEPS,
) -> float:  # fmt: skip
    """Train until the sampled pass rate on `check` reaches the target, or for `max_steps`; return the pass rate."""
    import torch

    rows = [encode(tokenizer, item) for item in shown]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    reached = 0.0
    for step in range(1, max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / WARMUP_STEPS)
        inputs, labels = collate(random.choices(rows, k=BATCH))
        policy(**inputs, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % CHECK_EVERY == 0:
            reached = pass_rate(policy, tokenizer, check)
            print(f"warm start: step {step}, {reached:.0%} of sampled answers right", file=sys.stderr, flush=True)
            if reached >= target:
                break
    return reached


def encode(tokenizer: Any, item: Item) -> tuple[list[int], list[int]]:
    return tokenizer.encode(item.prompt).ids, [*tokenizer.encode(item.answer).ids, tiny.EOS]


def collate(rows: list[tuple[list[int], list[int]]]) -> tuple[dict[str, Any], Any]:
    """Return model inputs padded on the right, and labels on the answers only."""
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), IGNORED)
    mask = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
        mask[row, :end] = 1
    return {"input_ids": ids, "attention_mask": mask}, labels


def pass_rate(policy: Any, tokenizer: Any, items: list[Item]) -> float:
    """Return the share of sampled answers that are exactly right."""
    import torch

    prompts = [tokenizer.encode(item.prompt).ids for item in items]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    policy.eval()
    with torch.no_grad():
        out = policy.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=True, top_k=0, pad_token_id=0
        )
    policy.train()
    answers = [row[: row.index(tiny.EOS)] if tiny.EOS in row else None for row in out[:, width:].tolist()]
    wanted = [tokenizer.encode(item.answer).ids for item in items]
    return sum(answer == right for answer, right in zip(answers, wanted, strict=True)) / len(items)


def main() -> None:
    reached = made(build, __doc__)
    if reached < TARGET:
        sys.exit(f"quickstart: the warm start ended at {reached:.0%}, below {TARGET:.0%}; try another --seed")


if __name__ == "__main__":
    main()
