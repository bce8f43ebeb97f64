# SPDX-License-Identifier: Apache-2.0
"""A whole run whose trainer and engine have number formats of their own."""

from __future__ import annotations

from pathlib import Path

from safetensors.numpy import load_file

from relax_core.views.run import open_run
from tests.graph.conftest import SMALL, Relax


def test_an_engine_in_bfloat16_serves_a_float32_trainer(train_here: Relax, tiny: Path, tmp_path: Path) -> None:
    run, formats = tmp_path / "run", ("steps=3", "rollout.dtype=bfloat16", "weights.payload=delta", "weights.proof=behaviour",
                                      "weights.tolerance=1.0", "optimizer.lr=1e-3", "optimizer.warmup_steps=0")  # fmt: skip
    ran = train_here(tiny / "recipe.toml", *SMALL, *formats, "--run-dir", run)
    assert ran.code == 0, ran.err
    metrics = open_run(run).metrics()
    far = metrics.column("train/rollout_log_prob_diff_lag0")
    assert far and all(1e-5 < mean < 0.1 for mean in far)
    for name in ("p99", "max"):
        assert all(a <= b for a, b in zip(far, metrics.column(f"train/rollout_log_prob_diff_lag0_{name}"), strict=True))
    assert all(least < 1 < most for least, most in zip(
        metrics.column("train/rollout_ratio_lag0_min"), metrics.column("train/rollout_ratio_lag0_max"), strict=True
    ))  # fmt: skip
    assert not [name for name in metrics.names() if "@" in name]
    assert {str(array.dtype) for array in load_file(run / "export" / "model.safetensors").values()} == {"float32"}
