# SPDX-License-Identifier: Apache-2.0
"""`relax convert fold-lora`: what it writes equals what peft merges, and what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from relax_plugin_workbench.fold import fold_lora
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from relax_core.api.errors import ConfigError
from relax_core.cli.main import app

Adapter = Callable[..., Path]
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of two weight files, with files that belong to the model and one that is stale once folded."""
    path, draw = tmp_path / "base", torch.Generator().manual_seed(0)
    path.mkdir()
    for number, name in enumerate((Q, V)):
        tensors = {f"{name}.weight": torch.randn(6, 8, generator=draw), f"norm.{number}.weight": torch.ones(8)}
        file = path / f"model-{number + 1:05d}-of-00002.safetensors"
        save_file({key: one.to(request.param) for key, one in tensors.items()}, file, metadata={"format": "pt"})
    (path / "config.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"stale")
    return path


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    def write(tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
        path, draw = tmp_path / "adapter", torch.Generator().manual_seed(1)
        path.mkdir()
        pair = {"A": torch.randn(2, 8, generator=draw), "B": torch.randn(6, 2, generator=draw)}
        own = {f"base_model.model.{Q}.lora_{side}.weight": matrix for side, matrix in pair.items()}
        save_file({**own, **(tensors or {})}, path / "adapter_model.safetensors")
        whole = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "use_dora": False, **config}
        (path / "adapter_config.json").write_text(json.dumps(whole))
        return path

    return write


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


@pytest.mark.parametrize(("rslora", "scale"), [(False, 3.0), (True, 6 / 2**0.5)])
def test_adapted_weights_are_folded_and_all_others_stay(
    base: Path, adapter: Adapter, tmp_path: Path, rslora: bool, scale: float
) -> None:
    folder, out = adapter(use_rslora=rslora), tmp_path / "out"
    ran = CliRunner().invoke(app, ["convert", "fold-lora", str(base), str(folder), "--out", str(out), "--json"])
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    assert (document["changed"], document["tensors"]) == (1, 4)
    before, after, pair = tensors(base), tensors(out), load_file(folder / "adapter_model.safetensors")
    low = scale * pair[f"base_model.model.{Q}.lora_B.weight"] @ pair[f"base_model.model.{Q}.lora_A.weight"]
    wanted = {**before, f"{Q}.weight": (before[f"{Q}.weight"].float() + low).to(before[f"{Q}.weight"].dtype)}
    assert after.keys() == wanted.keys()
    for name, want in wanted.items():
        torch.testing.assert_close(after[name], want, rtol=1e-6 if want.dtype == torch.float32 else 8e-3, atol=1e-6)
    assert torch.equal(after[f"{V}.weight"], before[f"{V}.weight"])
    assert sorted(path.name for path in out.iterdir() if path.suffix != ".safetensors") == ["config.json"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_dora": True}, "ADAPTER use_dora: got True; only pairs"),
        ({"modules_to_save": ["lm_head"]}, "ADAPTER modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "ADAPTER rank_pattern"),
        ({"init_lora_weights": "pissa_niter_4"}, "ADAPTER init_lora_weights"),
        ({"peft_type": "IA3"}, "ADAPTER peft_type"),
        ({"bias": "all"}, "ADAPTER bias"),
        ({"r": None}, "has no rank and alpha"),
        ({"r": 4}, r"A \(2, 8\), B \(6, 2\) of rank 4"),
    ],
)
def test_adapters_that_are_more_than_pairs_are_refused(
    base: Path, adapter: Adapter, tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        fold_lora(base, adapter(**config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        (f"{V}.lora_A.weight", (2, 8), r"v_proj.weight with A \(2, 8\) of rank 2; .* has .* \(6, 8\)"),
        ("model.layers.9.mlp.up_proj.lora_A.weight", (2, 8), "has no such weight; name the model"),
        (f"{Q}.lora_B.weight", (5, 2), r"q_proj.weight with A \(2, 8\), B \(5, 2\) of rank 2; .* has .* \(6, 8\)"),
        (f"{Q}.lora_embedding_A", (2, 8), "it is not a matrix A or B"),
    ],
)
def test_adapters_that_do_not_fit_the_base_are_refused(
    base: Path, adapter: Adapter, tmp_path: Path, name: str, shape: tuple[int, int], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        fold_lora(base, adapter({f"base_model.model.{name}": torch.zeros(shape)}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_that_are_not_what_they_should_be_are_refused(base: Path, adapter: Adapter, tmp_path: Path) -> None:
    folder = adapter()
    for where, first, second, out in (
        ("BASE", tmp_path, folder, "out"), ("ADAPTER", base, base, "out"), ("--out", base, folder, "base"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as raised:
            fold_lora(first, second, tmp_path / out)
        assert raised.value.field == where
    (folder / "adapter_model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="a file can't be read"):
        fold_lora(base, folder, tmp_path / "out")
