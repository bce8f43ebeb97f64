# SPDX-License-Identifier: Apache-2.0
"""The language head in float32 under autocast: its logits, its gradients, and heads that it does not know."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from relax_core.api.errors import ConfigError
from relax_core.learn.huggingface import use_float32_head


def model_with(head: nn.Module) -> Any:
    return SimpleNamespace(get_output_embeddings=lambda: head)


def test_logits_are_of_rounded_weights_and_gradients_are_not_rounded() -> None:
    torch.manual_seed(0)
    head, features = nn.Linear(64, 32), torch.randn(8, 64).mul(20).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        plain = head(features)
    use_float32_head(model_with(head), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(features)
    exact = (features.double() @ head.weight.bfloat16().double().T + head.bias.bfloat16().double()).detach()
    assert plain.dtype == torch.bfloat16 and float((plain.detach() - exact).abs().max()) > 0.01
    assert logits.dtype == torch.float32 and float((logits.detach() - exact).abs().max()) < 1e-5
    logits.square().sum().backward()
    want = (2 * exact).T @ features.double()
    assert float((head.weight.grad.double() - want).abs().max() / want.abs().max()) < 1e-6
    assert not torch.equal(head.weight.grad, head.weight.grad.bfloat16().float())


def test_a_copy_of_the_head_computes_with_its_own_weights() -> None:
    """Adapters copy modules that are trained whole."""
    head = nn.Linear(2, 2, bias=False)
    use_float32_head(model_with(head), torch.bfloat16)
    own = copy.deepcopy(head)
    nn.init.zeros_(own.weight)
    assert head(torch.ones(1, 2)).any() and not own(torch.ones(1, 2)).any()


def test_a_head_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.head_dtype: got float32; the head of SimpleNamespace is Identity"):
        use_float32_head(model_with(nn.Identity()))
