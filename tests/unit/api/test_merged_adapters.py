# SPDX-License-Identifier: Apache-2.0
"""Adapters over a folder that is of another dtype than the engine, and the folder as numpy sees it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from relax_core.api import Version
from relax_core.api.weights import combined_fingerprint
from relax_core.engine_kit.model_weights import folder_arrays, folder_in_dtype, folder_tensors, stage_adapter
from relax_core.tensor_files.transport import Disk

LORA = {"rank": 1, "alpha": 3.0, "targets": ("q",)}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(0)
    path = tmp_path / "model"
    path.mkdir()
    tensors = {"m.q.weight": torch.randn(4, 6), "m.k.weight": torch.randn(2, 6), "steps": torch.arange(3)}
    save_file(tensors, path / "model.safetensors")
    return str(path)


def merged(folder: str, dtype: str) -> dict[str, tuple[np.ndarray, str]]:
    pair = [
        ("base_model.model.m.q.lora_A.weight", np.full((1, 6), 2, np.float32), "F32"),
        ("base_model.model.m.q.lora_B.weight", np.arange(4, dtype=np.float32).reshape(4, 1), "F32"),
    ]
    disk = Disk()
    base = combined_fingerprint(folder_tensors(folder, dtype).values())
    manifest = disk.send(Version("actor", 0, 1), "lora", base, pair, str(Path(folder).parent))
    staged = stage_adapter(manifest, disk, folder_tensors(folder), LORA)
    assert combined_fingerprint(staged.arrived) == manifest.wire_fingerprint
    return {name: (array, kind) for name, array, kind in staged.over_folder(folder, dtype)}


def test_only_weights_with_adapters_change(folder: str) -> None:
    whole = merged(folder, "F32")
    assert folder_tensors(folder, "F32") == folder_tensors(folder)
    own = {name: array for name, array, _ in folder_arrays(folder)}
    low = 3.0 * np.outer(np.arange(4), np.full(6, 2.0))
    np.testing.assert_allclose(whole["m.q.weight"][0], own["m.q.weight"] + low, rtol=1e-6)
    assert np.array_equal(whole["m.k.weight"][0], own["m.k.weight"])
    assert np.array_equal(whole["steps"][0], [0, 1, 2]) and whole["steps"][1] == "I64"


def test_in_another_dtype_the_base_is_the_folder_as_the_engine_has_it(folder: str) -> None:
    whole = merged(folder, "BF16")
    sent = [(name, array, kind) for name, array, kind in folder_in_dtype(folder, "BF16")]
    published = Disk().send(Version("actor", 0, 2), "full", "", sent, str(Path(folder).parent))
    base_fingerprint = combined_fingerprint(folder_tensors(folder, "BF16").values())
    assert base_fingerprint == published.fingerprint != combined_fingerprint(folder_tensors(folder).values())
    base = torch.from_numpy({name: np.array(array) for name, array, _ in folder_arrays(folder)}["m.q.weight"])
    want = base.bfloat16().float() + 3.0 * torch.outer(torch.arange(4.0), torch.full((6,), 2.0))
    have = torch.from_numpy(whole["m.q.weight"][0].view(np.int16)).view(torch.bfloat16)
    assert whole["m.q.weight"][1] == "BF16" and torch.equal(have, want.bfloat16())
