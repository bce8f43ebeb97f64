# SPDX-License-Identifier: Apache-2.0
"""Build the guessing game in a folder: tokenizer, a task for each secret letter, and a model that plays at random.

`python -m relax_contrib.recipes.guess_number.build FOLDER --seed 0`. The warm start trains on games whose guesses
ignore the hints. The model learns the form of a guess and, as hints have labels too, how hints depend on earlier turns.
Reinforcement learning must find out how to use hints for better guesses.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from random import Random
from typing import Any

from relax_contrib.recipes.making import made, untrained
from relax_contrib.recipes.quickstart import model as tiny

LETTERS = "abcdefghijklmnop"
GUESSES = 4
PROMPT = "?"
STEPS, WARMUP_STEPS, BATCH, RATE = 400, 10, 64, 2e-3
GAMES = 256
IGNORED = -100


def build(folder: Path, seed: int, steps: int = STEPS) -> float:
    """Write all files that the recipe's TOML names; return the win rate of the warm start, or nan without it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny.save_tokenizer(folder / "model")
    with (folder / "tasks.jsonl").open("w") as file:
        for letter in LETTERS:
            prompt = [{"role": "user", "content": PROMPT}]
            file.write(json.dumps({"id": f"secret-{letter}", "prompt": prompt, "answer": letter}) + "\n")
    policy = tiny.build_model(seed)
    random = Random(f"guess number {seed}")
    if not untrained():
        warm_up(policy, tokenizer, random, steps)
    policy.save_pretrained(folder / "model")
    return math.nan if untrained() else win_rate(policy, tokenizer, random)


def warm_up(policy: Any, tokenizer: Any, random: Random, steps: int) -> None:
    """Train on games of random guesses, with labels on all tokens but the prompt's.

    Without labels on the hints, reinforcement learning needs about 300 steps to begin using the hints.
    """
    import torch

    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / WARMUP_STEPS)
        inputs, labels = collate([random_game(tokenizer, random) for _ in range(BATCH)])
        policy(**inputs, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def random_game(tokenizer: Any, random: Random) -> tuple[list[int], list[int]]:
    """Return token ids and labels of one game."""
    secret = random.choice(LETTERS)
    ids = list(tokenizer.encode(PROMPT).ids)
    for _ in range(GUESSES):
        guess = random.choice(LETTERS)
        ids += [*tokenizer.encode(guess).ids, tiny.EOS, *tokenizer.encode(hint(secret, guess)).ids]
        if guess == secret:
            break
    return ids, [IGNORED] * len(PROMPT) + ids[len(PROMPT) :]


def hint(secret: str, guess: str) -> str:
    return "=" if guess == secret else "<" if secret < guess else ">"


def collate(games: list[tuple[list[int], list[int]]]) -> tuple[dict[str, Any], Any]:
    """Return model inputs and labels, padded on the right."""
    import torch

    width = max(len(ids) for ids, _ in games)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in games])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in games])
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in games])
    return {"input_ids": ids, "attention_mask": mask}, labels


def win_rate(policy: Any, tokenizer: Any, random: Random) -> float:
    """Return the share of sampled games with a hit; a guess must be one token and `<eos>`, or it counts as wrong."""
    import torch

    secrets = [random.choice(LETTERS) for _ in range(GAMES)]
    ids = torch.tensor([tokenizer.encode(PROMPT).ids] * GAMES)
    won = [False] * GAMES
    torch.manual_seed(random.randrange(1 << 31))
    for _ in range(GUESSES):
        for _ in range(2):
            with torch.no_grad():
                logits = policy(input_ids=ids).logits[:, -1]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
        guesses = [tokenizer.decode([guess]) if end == tiny.EOS else "" for guess, end in ids[:, -2:].tolist()]
        won = [before or guess == secret for before, guess, secret in zip(won, guesses, secrets, strict=True)]
        said = [hint(secret, guess) if guess else "!" for guess, secret in zip(guesses, secrets, strict=True)]
        ids = torch.cat([ids, torch.tensor([tokenizer.encode(one).ids for one in said])], 1)
    return sum(won) / GAMES


def main() -> None:
    won = made(build, __doc__)
    if not math.isnan(won):
        print(f"guess the number: playing at random wins {won:.0%} of {GAMES} games", file=sys.stderr)


if __name__ == "__main__":
    main()
