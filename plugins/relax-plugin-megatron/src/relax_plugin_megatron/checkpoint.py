# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that resume training bit for bit, in any layout: pieces under Hugging Face names (`trainer_kit.checkpoint`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from relax_core.api import ConfigError
from relax_core.trainer_kit.checkpoint import (
    FIELD,
    MOMENTS,
    WEIGHTS,
    Snapshot,
    check_architecture,
    check_base,
    look,
    restore_random_state,
)
from relax_core.trainer_kit.ranks import Ranks
from relax_core.trainer_kit.shards import Piece, PieceReader, to_host
from relax_plugin_megatron import optimizer as optimizers
from relax_plugin_megatron.optimizer import Optimizer
from relax_plugin_megatron.weights import Weights


def take_snapshot(weights: Weights, optimizer: Optimizer, state: Mapping[str, Any], ranks: Ranks) -> Snapshot:
    """Copy this rank's pieces of weights and moments to host memory, one parameter at a time. All ranks must call.

    With adapters, the frozen base is not copied.
    """
    pieces: dict[str, Piece] = {}
    with optimizer.loaded():
        for held in weights.saved_here:
            if not held.parameter.requires_grad:
                pieces |= weights.pieces(held, weights.exact(held), WEIGHTS)
                continue
            whole = optimizer.whole(held.parameter)
            pieces |= weights.pieces(held, whole[optimizers.WEIGHT], WEIGHTS)
            for name in optimizers.MOMENTS:
                if name in whole:
                    found = weights.pieces(held, whole[name], MOMENTS, f"/{name}")
                    pieces |= found
                    if held.group.rank() == 0:
                        steps = (f"{MOMENTS}{source}/{optimizers.STEP}" for source in held.mapped.sources)
                        pieces |= {key: Piece(to_host(whole[optimizers.STEP]), ()) for key in steps if found}
    return Snapshot.of(pieces, state, ranks)


def load_checkpoint(directory: str, weights: Weights, optimizer: Optimizer, base: str) -> dict[str, Any]:
    """Restore weights, moments and random state; return the saved `state.json`.

    `base`: fingerprint of the model below the adapters; empty without adapters. Raises ConfigError for a checkpoint that
    is incomplete or does not fit the model or its adapters.
    """
    path = Path(directory)
    state, found = look(path)
    check_base(directory, state.get("base", ""), base)
    check_architecture(directory, found, {name: entry.shape for name, entry in weights.saved.items()})
    try:
        files = PieceReader(path)
        with optimizer.loaded():
            for held in weights.saved_here:
                whole = {optimizers.WEIGHT: weights.read(held, files, WEIGHTS)}
                if not held.parameter.requires_grad:
                    weights.set_frozen(held, whole[optimizers.WEIGHT])
                    continue
                step = f"{MOMENTS}{held.mapped.sources[0]}/{optimizers.STEP}"
                if step in files:
                    whole[optimizers.STEP] = files.read(step, ())
                    for name in optimizers.MOMENTS:
                        whole[name] = weights.read(held, files, MOMENTS, f"/{name}")
                optimizer.restore(held.parameter, whole)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(FIELD, path, f"files can't be read ({error}); resume from another checkpoint") from error
    restore_random_state(state["random"])
    return state
