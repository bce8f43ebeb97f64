# SPDX-License-Identifier: Apache-2.0
"""Build the recipe in a folder: tokenizer, tasks, and a model that sometimes calls the calculator.

`python -m relax_contrib.recipes.calculator.build FOLDER --seed 0`. The warm start trains on two kinds of conversations:
one calls the calculator and repeats the result, the second answers at once with a random number. Reinforcement learning
must find out that calling is better.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from random import Random
from typing import Any

from relax_contrib.recipes.calculator.server import calculate
from relax_contrib.recipes.calculator.task import CLOSES, OPENS, Item, items, save_tokenizer, write
from relax_contrib.recipes.guess_number.build import IGNORED, collate
from relax_contrib.recipes.making import made, untrained
from relax_contrib.recipes.quickstart import model as tiny

STEPS, WARMUP_STEPS, BATCH, RATE = 600, 50, 64, 2e-3
CHECK_EVERY, TARGET = 20, 0.42
ASKED = 0.5
"""Share of the warm start's conversations that call the calculator."""
CALL_TOKENS, ANSWER_TOKENS = 12, 6


def build(folder: Path, seed: int) -> float:
    """Write all files that the recipe's TOML names; return the sampled pass rate of the warm start, or nan without it."""
    train, held_out = items(seed)
    tokenizer = save_tokenizer(folder / "model")
    write(train, folder / "train.jsonl")
    write(held_out, folder / "held-out.jsonl")
    policy = tiny.build_model(seed)
    random = Random(f"calculator's warm start {seed}")
    reached = math.nan if untrained() else warm_up(policy, tokenizer, train, random)
    policy.save_pretrained(folder / "model")
    return reached


def warm_up(policy: Any, tokenizer: Any, train: list[Item], random: Random) -> float:
    """Train on the policy's turns until the sampled pass rate reaches `TARGET`, or for `STEPS`; return the pass rate."""
    import torch

    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    reached = 0.0
    for step in range(1, STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / WARMUP_STEPS)
        inputs, labels = collate([conversation(tokenizer, random.choice(train), random) for _ in range(BATCH)])
        policy(**inputs, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % CHECK_EVERY == 0:
            reached = pass_rate(policy, tokenizer, train[:256])
            print(f"warm start: step {step}, {reached:.0%} of sampled answers right", file=sys.stderr, flush=True)
            if reached >= TARGET:
                break
    return reached


def conversation(tokenizer: Any, item: Item, random: Random) -> tuple[list[int], list[int]]:
    """Return token ids and labels of one conversation; only the policy's turns have labels."""
    said = [(f"{item.expression}=", False)]
    if random.random() < ASKED:
        said += [(f"{OPENS}{item.expression}{CLOSES}", True), (f"[{item.answer}]", False), (item.answer, True)]
    else:
        said.append((str(random.randrange(10 ** random.randint(1, 4))), True))
    ids: list[int] = []
    labels: list[int] = []
    for text, own in said:
        turn = [*tokenizer.encode(text).ids, *([tiny.EOS] if own else [])]
        ids += turn
        labels += turn if own else [IGNORED] * len(turn)
    return ids, labels


def pass_rate(policy: Any, tokenizer: Any, items: list[Item]) -> float:
    """Return the share of sampled conversations whose last turn is the answer."""
    asked = [f"{item.expression}=" for item in items]
    first = sampled(policy, tokenizer, asked, CALL_TOKENS)
    results = [calculate(turn.removeprefix(OPENS).removesuffix(CLOSES)) for turn in first]
    second = sampled(
        policy, tokenizer,
        [f"{prompt}{turn}<eos>[{result}]" for prompt, turn, result in zip(asked, first, results, strict=True)], ANSWER_TOKENS,
    )  # fmt: skip
    last = [then if turn.startswith(OPENS) else turn for turn, then in zip(first, second, strict=True)]
    return sum(turn == item.answer for turn, item in zip(last, items, strict=True)) / len(items)


def sampled(policy: Any, tokenizer: Any, prompts: list[str], most_tokens: int) -> list[str]:
    """Sample one turn for each prompt; a turn that did not end is empty."""
    import torch

    rows = [tokenizer.encode(prompt).ids for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    policy.eval()
    with torch.no_grad():
        out = policy.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=most_tokens, do_sample=True, top_k=0, pad_token_id=0
        )
    policy.train()
    turns = out[:, width:].tolist()
    return [tokenizer.decode(turn[: turn.index(tiny.EOS)]) if tiny.EOS in turn else "" for turn in turns]


def main() -> None:
    reached = made(build, __doc__)
    if reached < TARGET:
        sys.exit(f"calculator: the warm start ended at {reached:.0%}, below {TARGET:.0%}; try another --seed")


if __name__ == "__main__":
    main()
