# SPDX-License-Identifier: Apache-2.0
"""Conformance checks of engines' number formats: weights have the format that is claimed, log-probs are computed in
float32 whatever it is. A part of `EngineSuite`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from relax_core.api.engine import Engine
from relax_core.api.weights import TensorInfo, Version, combined_fingerprint, tensor_fingerprint
from relax_core.testing.engine_adapters import adapter, published
from relax_core.testing.engine_fixture import VOCABULARY, EngineFixture, Tensors, tensors_of, tiny_qwen3
from relax_core.testing.engine_in_flight import PROMPT
from relax_core.testing.engine_truth import plain_log_probs

APART = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.15}
"""Of a log-prob from that of a float32 forward with the same, rounded weights."""
NORMAL = 1e-5
"""Of the sum of probabilities from 1; a softmax in bfloat16 is off by a hundred times as much."""
SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class EngineFormatChecks:
    """Tests of an engine that is started anew in each format; it has float32 weights in its folder."""

    @classmethod
    def make_engine(cls) -> Engine:
        raise NotImplementedError

    @pytest.fixture(scope="class", params=tuple(APART))
    def formatted(
        self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[tuple[str, EngineFixture]]:
        engine, dtype = request.cls.make_engine(), request.param
        if dtype not in engine.capabilities.dtypes:
            pytest.skip(f"does not claim {dtype}")
        first, second = (tiny_qwen3(str(tmp_path_factory.mktemp("model")), seed) for seed in (1, 2))
        lab = EngineFixture(engine, first, second).start(dtype, version=Version("actor", 0, 0))
        yield dtype, lab
        lab.stop()

    def test_every_format_is_published_and_scored_in_float32(
        self, formatted: tuple[str, EngineFixture], tmp_path: Path
    ) -> None:
        dtype, lab = formatted
        assert lab.facts["dtype"] == dtype
        manifest = lab.publish(rounded(tensors_of(lab.other), dtype))
        assert lab.update(manifest).fingerprint == manifest.fingerprint
        (got,) = lab.generate(lab.request(PROMPT, 9, seed=1, num_top=VOCABULARY))
        for ranked in got.top:
            assert abs(np.exp([value for _, value in ranked], dtype=np.float64).sum() - 1) < NORMAL
        folder = as_folder(lab.other, dtype, tmp_path / "rounded")
        rows = plain_log_probs(folder, (*PROMPT, *got.tokens))[len(PROMPT) - 1 : -1]
        want = rows[np.arange(len(got.tokens)), list(got.tokens)]
        np.testing.assert_allclose(got.log_probs, want, atol=APART[dtype], rtol=0)

    def test_an_adapter_lies_over_the_folder_in_every_format(self, formatted: tuple[str, EngineFixture]) -> None:
        dtype, lab = formatted
        if not lab.engine.capabilities.lora:
            pytest.skip("does not claim adapters")
        base = lab.publish(rounded(tensors_of(lab.model), dtype))
        lab.update(base)
        manifest = published(lab, adapter(lab, 1), fingerprint_of(rounded(tensors_of(lab.model), dtype)))
        assert lab.update(manifest).fingerprint == manifest.wire_fingerprint


def rounded(tensors: Tensors, dtype: str) -> Tensors:
    """Float32 tensors in another format, rounded once, to even."""
    import torch

    kind = getattr(torch, dtype)
    made: Tensors = []
    for name, array, _ in tensors:
        value = torch.from_numpy(np.array(array)).to(kind)
        bits = value.view(torch.uint16) if dtype == "bfloat16" else value
        made.append((name, bits.numpy(), SAFETENSORS[dtype]))
    return made


def as_folder(like: str, dtype: str, directory: Path) -> str:
    """A copy of a model folder whose float32 weights have the values of another format."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(like, directory)
    kind = getattr(torch, dtype)
    whole = {name: torch.from_numpy(np.array(array)).to(kind).float() for name, array, _ in tensors_of(like)}
    save_file(whole, directory / "model.safetensors", {"format": "pt"})
    return str(directory)


def fingerprint_of(tensors: Tensors) -> str:
    return combined_fingerprint(
        TensorInfo(name, array.shape, dtype, tensor_fingerprint(array), array.nbytes) for name, array, dtype in tensors
    )
