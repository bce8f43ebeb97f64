# SPDX-License-Identifier: Apache-2.0
"""The models of the benchmark `mismatch`, written down before anything was measured: five mixtures of experts, one dense.

They learn the words of a random chain, in which each has four successors, for so many steps; the corpus is the seed's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from relax_contrib.recipes.families import save_tokenizer

WORDS, SUCCESSORS = 372, 4
PROMPTS, PROMPT_WORDS = 64, 16
ROWS, LENGTH, LR = 8, 64, 1e-3
"""Of one step of learning."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One model before it is drawn."""

    experts: int
    top_k: int
    layers: int
    steps: int
    """Of learning the corpus."""
    init: float = 0.02

    @property
    def cost(self) -> int:
        """What it takes to learn, in no unit: the cheap ones are measured first."""
        return self.steps * self.layers * (1 + self.experts) * (1 + self.top_k)


SHAPES: Mapping[str, Shape] = {
    "16 experts, top 2, 4 layers, near init": Shape(16, 2, 4, 1),
    "16 experts, top 2, 4 layers": Shape(16, 2, 4, 200),
    "64 experts, top 4, 4 layers": Shape(64, 4, 4, 200),
    "64 experts, top 8, 6 layers": Shape(64, 8, 6, 200),
    "16 experts, top 2, 4 layers, init x 3": Shape(16, 2, 4, 1, 0.06),
    "dense, 4 layers": Shape(0, 0, 4, 200),
}
"""Those of ../shared/research/omni-cpu.md, section 5, and a control."""


def build(folder: Path, shape: Shape, seed: int) -> dict[str, Any]:
    """Model, tokenizer and prompts in a folder; returns the configuration."""
    import torch

    torch.manual_seed(seed)
    words = [f"w{number}" for number in range(WORDS)]
    tokenizer = save_tokenizer(words, folder / "model")
    first = tokenizer.token_to_id("w0")
    chain = _Chain(seed)
    model = _drawn(shape, tokenizer.get_vocab_size())
    _learn(model, chain, shape.steps, first)
    model.save_pretrained(folder / "model")
    lines = [json.dumps({"prompt": " ".join(words[at] for at in chain.walk(PROMPT_WORDS)), "answer": words[0]})
             for _ in range(PROMPTS)]  # fmt: skip
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {
        "steps": 1, "seed": seed, "algorithm": {"name": "grpo"}, "engine": {"name": "transformers"},
        "trainer": {"name": "torch", "device": "cpu"}, "rewards": [{"name": "exact"}], "eval": {"every": 0},
        "model": {"path": str(folder / "model")}, "data": {"train": str(folder / "train.jsonl")},
        "rollout": {"groups_per_step": PROMPTS, "group_size": 2, "max_new_tokens": 48},
    }  # fmt: skip


class _Chain:
    """A walk over words."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._next = [self._random.sample(range(WORDS), SUCCESSORS) for _ in range(WORDS)]

    def walk(self, length: int) -> list[int]:
        walked = [self._random.randrange(WORDS)]
        while len(walked) < length:
            walked.append(self._random.choices(self._next[walked[-1]], (8, 4, 2, 1))[0])
        return walked


def _drawn(shape: Shape, vocab_size: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = {
        "vocab_size": vocab_size, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": shape.layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
        "initializer_range": shape.init, "tie_word_embeddings": False, "pad_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    if not shape.experts:
        return Qwen3ForCausalLM(Qwen3Config(**common))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **common, num_experts=shape.experts, num_experts_per_tok=shape.top_k, moe_intermediate_size=96,
            norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        )
    )  # fmt: skip


def _learn(model: Any, chain: _Chain, steps: int, first: int) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), LR)
    for _ in range(steps):
        ids = torch.tensor([[first + at for at in chain.walk(LENGTH)] for _ in range(ROWS)])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
