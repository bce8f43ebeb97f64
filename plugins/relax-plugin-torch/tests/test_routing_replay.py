# SPDX-License-Identifier: Apache-2.0
"""Routing replay: the model's own experts change nothing, others do, in every layout and in recomputed blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax_plugin_torch.blocks import recompute_blocks
from relax_plugin_torch.layout import PrefixTree, by_row, one_line
from relax_plugin_torch.policy import Policy
from relax_plugin_torch.routing_replay import RoutingReplay, prefix_keys
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from relax_core import learn
from relax_core.api import ConfigError, Ragged, RowBatch, RowId
from relax_core.learn.huggingface import RouterReplay
from relax_core.testing.moe import EXPERTS, LAYERS, TOP_K, moe_config

ROWS = [(1, 2, 3, 4, 5), (1, 2, 3, 6), (1, 2, 3, 4, 7, 8), (9, 8, 7, 6)]
GROUPS = [0, 0, 0, 1]


def model(kind: str = "qwen3_moe", **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(moe_config(kind, **changes), dtype=torch.float32)
    for name, parameter in made.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, std=0.5)
    return made.eval()


def policy(of: PreTrainedModel, share: bool = True) -> Policy:
    return Policy(
        of, temperature=1.0, autocast=None, max_logits=2**20, share_prefixes=share, routing_replay=RoutingReplay(of)
    )


def rows(experts: np.ndarray | None = None, valid: np.ndarray | None = None) -> RowBatch:
    arrays = [np.array(row, np.int32) for row in ROWS]
    masks = [np.array([0] + [1] * (len(row) - 1), np.uint8) for row in ROWS]
    ids = tuple(RowId(group, number, 0, 0) for number, group in enumerate(GROUPS))
    lengths = np.array([len(row) for row in ROWS])
    columns = {"tokens": Ragged.of(arrays), "loss_mask": Ragged.of(masks)}
    if experts is not None:
        columns["routed_experts"] = Ragged(experts, lengths)
    if valid is not None:
        columns["routed_valid"] = Ragged(valid, lengths)
    return RowBatch(ids, columns)


def scored(by: Policy, batch: RowBatch, how: str = "auto") -> tuple[Tensor, learn.PackedBatch]:
    packed = learn.PackedBatch(batch)
    layouts = {"row": by_row, "line": one_line, "tree": lambda p: PrefixTree(p, prefix_keys(p)).layout()}
    if how == "auto":
        return by.score(packed)["log_probs"], packed
    return by._score(packed, layouts[how](packed), ())["log_probs"], packed


def own_experts(by: Policy, how: str = "row") -> np.ndarray:
    assert by.routing_replay is not None
    with torch.no_grad():
        _, packed = scored(by, rows(), how)
    return by.routing_replay.column(packed).values


def others(experts: np.ndarray) -> np.ndarray:
    """Every expert replaced by the next one."""
    return ((experts.astype(np.int64) + 1) % EXPERTS).astype(experts.dtype)


KINDS = ["qwen3_moe", "qwen3_moe plain", "mixtral", "olmoe", "qwen3_5_moe_text"]


@pytest.mark.parametrize("kind", KINDS)
def test_replaying_own_experts_changes_nothing_and_others_change_log_probs(kind: str) -> None:
    by = policy(model(kind), share=False)
    plain, _ = scored(by, rows())
    experts = own_experts(by)
    assert experts.dtype == np.uint8 and experts.shape == (sum(map(len, ROWS)), LAYERS, TOP_K)
    replayed, _ = scored(by, rows(experts))
    assert torch.equal(replayed, plain)
    shifted, _ = scored(by, rows(others(experts)))
    assert (shifted - plain).abs().max() > 0.01


@pytest.mark.parametrize("how", ["row", "line", "tree"])
def test_every_layout_replays_each_token_its_own_experts(how: str) -> None:
    by = policy(model())
    assert by.routing_replay is not None
    experts = others(own_experts(by))
    if how == "line":  # rows in one line need a kernel that keeps them apart; here a row alone stands for it
        batch = rows(experts).take([2])
        single, alone = scored(by, batch, "line")[0], scored(by, batch, "row")[0]
        assert torch.equal(single, alone)
        return
    together, packed = scored(by, rows(experts), how)
    np.testing.assert_array_equal(
        np.sort(by.routing_replay._replay._planned.transpose(0, 1)[by.routing_replay._places].numpy(), -1),  # type: ignore[union-attr]
        np.sort(experts[by.routing_replay._inputs.numpy()], -1),
    )
    starts = np.cumsum([0, *map(len, ROWS)])
    for number in range(len(ROWS)):
        alone, _ = scored(by, rows(experts).take([number]), "row")
        torch.testing.assert_close(together[starts[number] : starts[number + 1]], alone, atol=1e-5, rtol=0)
    assert float(by.routing_replay.metrics()["routing/replayed"][0]) > 0


def test_prefixes_with_other_experts_are_not_shared() -> None:
    by = policy(model())
    experts = own_experts(by).copy()
    same = PrefixTree(learn.PackedBatch(rows(experts)), prefix_keys(learn.PackedBatch(rows(experts))))
    assert same.width == PrefixTree(learn.PackedBatch(rows())).width
    experts[5] = others(experts[5:6])  # the second row's first token went elsewhere
    batch = learn.PackedBatch(rows(experts))
    assert PrefixTree(batch, prefix_keys(batch)).width > same.width
    together, _ = scored(by, rows(experts), "tree")
    alone, _ = scored(by, rows(experts).take([1]), "row")
    torch.testing.assert_close(together[5:9], alone, atol=1e-5, rtol=0)


def test_the_model_chooses_and_counts_experts_of_positions_without_recorded_ones() -> None:
    by = policy(model(), share=False)
    plain, _ = scored(by, rows())
    shifted = others(own_experts(by))
    nowhere = np.zeros(len(shifted), np.uint8)
    assert torch.equal(scored(by, rows(shifted, nowhere))[0], plain)
    half = nowhere.copy()
    half[: len(ROWS[0])] = 1
    scored(by, rows(shifted, half))
    assert by.routing_replay is not None
    counted = {name: (float(total), float(count)) for name, (total, count) in by.routing_replay.metrics().items()}
    fed = float(sum(map(len, ROWS)) - len(ROWS))
    assert counted["routing/replayed"] == (len(ROWS[0]) - 1, fed)
    assert counted["routing/differs"] == (len(ROWS[0]) - 1, len(ROWS[0]) - 1)
    scored(by, rows(own_experts(by)))
    assert float(by.routing_replay.metrics()["routing/differs"][0]) == 0.0


def gradients(by: Policy, batch: RowBatch) -> dict[str, Tensor]:
    by.model.zero_grad()
    scored(by, batch, "row")[0].sum().backward()
    return {name: parameter.grad for name, parameter in by.model.named_parameters() if parameter.grad is not None}


def test_the_gate_keeps_its_gradient_and_recomputation_replays_the_same() -> None:
    plain, again = model(), model()
    recompute_blocks(again)
    first, second = policy(plain), policy(again)
    experts = others(own_experts(first))
    wanted, got = gradients(first, rows(experts)), gradients(second, rows(experts))
    assert wanted.keys() == got.keys()
    for name, gradient in wanted.items():
        assert torch.equal(gradient, got[name]), name
    gates = [gradient for name, gradient in wanted.items() if name.endswith("mlp.gate.weight")]
    assert len(gates) == LAYERS and all(gradient.abs().max() > 0 for gradient in gates)


def test_replaying_own_experts_gives_the_same_gradients() -> None:
    by = policy(model(), share=False)
    wanted = gradients(by, rows())
    for name, gradient in gradients(by, rows(own_experts(by))).items():
        assert torch.equal(gradient, wanted[name]), name


def test_experts_of_another_model_are_refused_by_name() -> None:
    by = policy(model())
    for wrong in (
        np.zeros((sum(map(len, ROWS)), LAYERS, 1), np.uint8),
        np.full((sum(map(len, ROWS)), 2, 2), 8, np.uint8),
    ):
        with pytest.raises(ValueError, match="2 layers that choose 2 of 8"):
            scored(by, rows(wrong))


def test_a_router_that_weighs_in_another_way_is_refused() -> None:
    made = model()
    made.model.layers[0].mlp.gate.norm_topk_prob = False
    for layer in made.model.layers:
        layer.mlp.gate.forward = _sigmoid.__get__(layer.mlp.gate)
    with pytest.raises(ConfigError, match="weighs its experts in another way"):
        RouterReplay(made)


def _sigmoid(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden @ self.weight.T
    top = logits.sigmoid().topk(self.top_k, -1)
    return logits, top.values, top.indices


def test_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    from relax_core.testing.engine_fixture import tiny_qwen3

    dense = AutoModelForCausalLM.from_pretrained(tiny_qwen3(str(tmp_path), 1))
    with pytest.raises(ConfigError, match="routers"):
        RouterReplay(dense)
