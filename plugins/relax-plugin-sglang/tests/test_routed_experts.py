# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-MoE in SGLang tells which experts its positions visited: those that a plain forward visits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax_plugin_sglang.engine import SglangEngine
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from relax_core.api.engine import Delta, EngineSpec
from relax_core.api.errors import ConfigError
from relax_core.api.weights import Version
from relax_core.testing.engine_fixture import CONTEXT, PROMPT, PROMPTS, VOCABULARY, EngineFixture, agrees
from relax_core.testing.engine_hosted import HostedEngine

EXPERTS, TOP_K = 8, 2


def tiny_moe(folder: Path, seed: int, dense: Sequence[int] = ()) -> str:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        mlp_only_layers=list(dense), max_position_embeddings=CONTEXT, initializer_range=0.2, norm_topk_prob=True,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFixture]:
    folder = tmp_path_factory.mktemp("mixture")
    engine = HostedEngine("sglang", SglangEngine.capabilities)
    lab = EngineFixture(engine, tiny_moe(folder / "1", 1), tiny_moe(folder / "2", 2))
    model = {"path": lab.model, "dtype": "float32", "routing_replay": "rollout"}
    lab.facts = dict(lab.run(engine.start(EngineSpec(model, CONTEXT, version=Version("actor", 0, 0))), 600.0))
    yield lab
    lab.stop()


def visited(folder: str, tokens: tuple[int, ...]) -> np.ndarray:
    """[positions, layers with experts, top_k], sorted: what a plain forward's routers choose."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda gate, args, out: chosen.append(_logits(gate, args)))
    with torch.no_grad():
        model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    return np.stack([np.sort(logits.topk(TOP_K, -1).indices.numpy(), -1) for logits in chosen], 1)


def _logits(gate: Any, args: Any) -> torch.Tensor:
    return torch.nn.functional.linear(args[0].reshape(-1, gate.weight.shape[1]), gate.weight)


def experts_of(parts: list[Delta], length: int) -> np.ndarray:
    """By position, sorted; what came first stays."""
    found = np.full((length, 2, TOP_K), -1)
    for part in parts:
        told = np.frombuffer(part.routed_experts, np.uint8).reshape(-1, 2, TOP_K)
        for at, choice in enumerate(told, part.routed_from):
            if found[at, 0, 0] < 0:
                found[at] = np.sort(choice, -1)
    return found


async def collected(stream: Any) -> list[Delta]:
    return [delta async for deltas in stream for delta in deltas]


def test_every_computed_position_reports_the_experts_of_a_plain_forward(lab: EngineFixture) -> None:
    requests = [lab.request(prompt, 9, seed=i, routed_experts=True) for i, prompt in enumerate((*PROMPTS, PROMPT))]
    deltas = lab.run(collected(lab.engine.generate(requests)))
    for request in requests:
        parts = [delta for delta in deltas if delta.id == request.id]
        tokens = (*request.tokens, *(token for part in parts for token in part.tokens))
        np.testing.assert_array_equal(experts_of(parts, len(tokens))[:-1], visited(lab.model, tokens)[:-1])


def test_experts_are_reported_only_on_request(lab: EngineFixture) -> None:
    deltas = lab.run(collected(lab.engine.generate([lab.request(PROMPT, 3)])))
    assert {delta.routed_experts for delta in deltas} == {b""}


def test_experts_are_of_the_weights_that_sampled_the_next_token(lab: EngineFixture) -> None:
    """Whatever version a token is of, the engine may compute it again; what was told first is what it was drawn from."""
    before = lab.version.step
    parts = lab.updated_amid([lab.endless(PROMPT, seed=3, routed_experts=True)], lambda: lab.update(lab.publish()))
    old = [token for part in parts if part.version == before for token in part.tokens]
    new = [token for part in parts if part.version == lab.version.step for token in part.tokens]
    assert old and new
    tokens, seam = (*PROMPT, *old, *new), len(PROMPT) + len(old) - 1
    found = experts_of(parts, len(tokens))
    np.testing.assert_array_equal(found[:seam], visited(lab.model, tokens)[:seam])
    np.testing.assert_array_equal(found[seam:-1], visited(lab.other, tokens)[seam:-1])
    lab.update(lab.publish(source=lab.model))


def test_an_aborted_request_reports_its_experts(lab: EngineFixture) -> None:
    request = lab.endless(PROMPT, seed=3, routed_experts=True)

    async def run() -> list[Delta]:
        stream = lab.engine.generate([request])
        parts = list(await anext(stream))
        await lab.engine.abort([request.id])
        return parts + await collected(stream)

    parts = lab.run(run())
    tokens = (*PROMPT, *(token for part in parts for token in part.tokens))
    assert parts[-1].finish == "abort"
    np.testing.assert_array_equal(experts_of(parts, len(tokens))[:-1], visited(lab.model, tokens)[:-1])


def test_log_probs_of_a_mixture_agree_with_a_plain_forward(lab: EngineFixture) -> None:
    (got,) = lab.generate(lab.request(PROMPT, 9, seed=1))
    agrees(lab.model, PROMPT, got)


def test_dense_layers_that_sglang_would_take_for_sparse_are_refused(tmp_path: Path) -> None:
    other = EngineFixture(HostedEngine("sglang", SglangEngine.capabilities), tiny_moe(tmp_path, 1, dense=[1]), "")
    with pytest.raises(ConfigError, match="dense layers"):
        other.start()
    other.stop()
