# SPDX-License-Identifier: Apache-2.0
"""What a folder holds, and versions that are not of its model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relax_core.api import ConfigError, Version
from relax_core.api.weights import Manifest, TensorInfo, tensor_fingerprint
from relax_core.engine_kit.model_weights import check_manifest, folder_tensors
from relax_core.tensor_files.transport import Disk


@pytest.fixture
def published(tmp_path: Path) -> Manifest:
    """Two tensors under `tmp_path`, written as a trainer publishes them: a safetensors file."""
    arrays = [("a.weight", np.arange(12, dtype=np.float32).reshape(3, 4), "F32"), ("b", np.ones(3, np.uint16), "BF16")]
    return Disk().send(Version("actor", 0, 1), "full", "", arrays, str(tmp_path))


def folder_of(manifest: Manifest) -> dict[str, TensorInfo]:
    folder = Path(manifest.location).parent / "model"
    folder.mkdir()
    shutil.copy(manifest.location, folder / "model.safetensors")
    return folder_tensors(str(folder))


def test_a_folder_is_read_as_it_was_written(published: Manifest) -> None:
    known = folder_of(published)
    assert known == {info.name: info for info in published.tensors}
    assert known["b"].fingerprint == tensor_fingerprint(np.ones(3, np.uint16))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model.path: got .*safetensors"):
        folder_tensors(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda infos: infos[:1], r"lacks \['b'\]"),
        (lambda infos: (*infos, replace(infos[0], name="c")), r"has \['c'\] beyond this model"),
        (lambda infos: (*infos, infos[0]), "3 tensors in all; publish the model's 2"),
        (lambda infos: (replace(infos[0], shape=(4, 3)), infos[1]), r"a.weight: have F32 \(4, 3\), want F32 \(3, 4\)"),
        (lambda infos: (replace(infos[0], dtype="F16"), infos[1]), "a.weight: have F16"),
    ],
)
def test_a_version_of_another_model_is_refused(published: Manifest, change, message: str) -> None:
    other = replace(published, tensors=change(published.tensors))
    with pytest.raises(ValueError, match=message):
        check_manifest(other, folder_of(published), "F32")


def test_a_version_in_the_engines_own_dtype_is_taken(published: Manifest) -> None:
    cast = replace(published, tensors=tuple(replace(info, dtype="BF16") for info in published.tensors))
    check_manifest(cast, folder_of(published), "BF16")
