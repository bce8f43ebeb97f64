# SPDX-License-Identifier: Apache-2.0
"""A whole run that learns from two teachers by domain, which are asked for the policy's ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from relax_core.views.run import open_run
from tests.graph.conftest import SMALL, Relax


def test_two_teachers_by_domain_see_the_policys_likeliest_tokens(train_here: Relax, tiny: Path, tmp_path: Path) -> None:
    """Without rewards, on the actor's devices in turns; both teach what the policy does not know yet."""
    tasks = [json.loads(line) for line in (tiny / "train.jsonl").read_text().splitlines()[:64]]
    for number, task in enumerate(tasks):
        task["domain"] = "even" if number % 2 == 0 else "odd"
    data = tmp_path / "domains.jsonl"
    data.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    paths = [perturbed(tiny / "model", tmp_path / name, seed) for seed, name in enumerate(("even", "odd"))]
    teachers = ", ".join(f'{{path = "{path}", only = "domain={path.name}"}}' for path in paths)
    options = (
        "algorithm=distillation", "checkpoint.every=0", "steps=3", f"data.train={data}", "rewards=[]", "placement=colocate",
        "algorithm.mode=loss", "algorithm.divergence=jsd", "algorithm.tokens=student-top-k", "algorithm.k=8",
        f"teachers=[{teachers}]",
    )  # fmt: skip
    ran = train_here(tiny / "recipe.toml", *SMALL, *options, "--run-dir", tmp_path / "run")
    assert ran.code == 0, ran.err
    assert (ran.json["status"], ran.json["samples_trained"]) == ("finished", 3 * 16)
    metrics = open_run(tmp_path / "run").metrics()
    assert all(value > 0 for value in metrics.column("distill/divergence"))
    assert metrics.column("train/loss") == pytest.approx(metrics.column("distill/divergence"), rel=1e-4)
    assert all(0 < share < 1 for share in metrics.column("distill/agreement"))
    assert all(norm > 0 for norm in metrics.column("train/grad_norm"))


def perturbed(model: Path, folder: Path, seed: int) -> Path:
    """The same model with every weight moved a little, from a seed."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    random = torch.Generator().manual_seed(seed)
    file = folder / "model.safetensors"
    moved = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=random) for name, tensor in load_file(file).items()
    }
    save_file(moved, file, metadata={"format": "pt"})
    return folder
