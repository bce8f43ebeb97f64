# SPDX-License-Identifier: Apache-2.0
"""The rows of a chunk on one rank: which have a gradient, the micro-batches, and the scored columns in order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from relax_core import learn
from relax_core.api import Algorithm, Chunk, Output, Ragged, RowBatch, Source, TrainerSpec


def check_lag(rows: RowBatch, algorithm: Algorithm, spec: TrainerSpec, step: int) -> None:
    """Raise ValueError for rows of the actor that are staler than the run allows, or whose lag is not known."""
    if spec.role != "actor":
        return  # the staleness bound is for the policy, not for a critic
    if "weight_versions" in rows.columns:
        learn.check_lag(rows, step, spec.max_staleness)
    elif algorithm.source is Source.ROLLOUT:
        raise ValueError(
            f"accumulate: rows have only columns {', '.join(rows.columns)}; add weight_versions to check their lag"
        )


def with_gradient(rows: RowBatch, algorithm: Algorithm, role: str) -> set[int]:
    """Return the indices of rows that the update needs: without rows of advantage 0, if the algorithm skips them."""
    skip = role == "actor" and algorithm.zero_advantage_skips and "advantages" in rows.columns
    return set(learn.rows_with_gradient(rows)) if skip else set(range(len(rows)))


def trained(rows: RowBatch) -> set[int]:
    """Return the indices of rows that have a trained token."""
    return {index for index, mask in enumerate(rows.columns["loss_mask"].rows()) if mask.any()}


def micro_batches(
    chunk: Chunk, rank: int, wanted: set[int], needed: set[int], *, device: str, together: bool
) -> Iterator[learn.PackedBatch | None]:
    """Yield the rank's micro-batches that have a `needed` row, each reduced to its `wanted` rows.

    `together`: all ranks compute each micro-batch at the same time, so yield None for one in which only other ranks
    have rows.
    """
    plan = chunk.plan.micro_batches
    for turn, planned in enumerate(plan[rank]):
        if not needed.isdisjoint(planned):
            yield learn.PackedBatch(chunk.rows.take([index for index in planned if index in wanted]), device=device)
        elif together and any(turn < len(other) and not needed.isdisjoint(other[turn]) for other in plan):
            yield None


def parsed_outputs(columns: Sequence[str], able: Collection[str]) -> list[Output]:
    """Return the outputs that `columns` name. Raises ValueError for an output that the trainer can't compute."""
    outputs = [Output.parse(key) for key in columns]
    unknown = [output.key for output in outputs if output.name not in able]
    if unknown:
        raise ValueError(f"forward: got columns {unknown}; this trainer computes {', '.join(sorted(able))}")
    return outputs


def scored_rows(
    chunk: Chunk, rank: int, outputs: Sequence[Output], parts: Sequence[Mapping[str, Ragged]], reports: bool
) -> RowBatch:
    """Join the columns of a rank's micro-batches to rows in the order of the chunk; no rows unless the rank `reports`."""
    filled = [name for output in outputs for name in output.gives]
    if not parts or not reports:
        return RowBatch((), {name: Ragged.of([]) for name in filled})
    indices = [index for planned in chunk.plan.micro_batches[rank] for index in planned]
    order = sorted(range(len(indices)), key=lambda place: indices[place])
    ids = tuple(chunk.rows.ids[indices[place]] for place in order)
    return RowBatch(ids, {name: Ragged.concatenate([part[name] for part in parts]).take(order) for name in filled})


def padded(batch: learn.PackedBatch, multiple: int = 1, *, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Lay out one row per line, padded on the right to a common multiple; without each row's last token unless `whole`.

    Return token ids [rows, width], and each token's predecessor as an index into the flattened ids, [tokens]. Attention
    is causal, so no token sees padding.
    """
    lengths = np.asarray(batch.rows.columns["tokens"].lengths)
    dropped = 0 if whole else 1
    width = max(1, int(lengths.max()) - dropped)
    width = -(-width // multiple) * multiple
    row = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.arange(len(row)) - np.repeat(lengths.cumsum() - lengths, lengths)
    ids = np.zeros((len(lengths), width), np.int64)
    inputs = offset < lengths[row] - dropped
    ids[row[inputs], offset[inputs]] = batch.rows.columns["tokens"].values[inputs]
    return ids, row * width + offset - 1


def wanted(outputs: Collection[Output], batch: learn.PackedBatch, trained: Tensor, vocab_size: int) -> learn.Wanted:
    """Return the scores that `outputs` need at the batch's trained positions.

    Raises ValueError for a k or a token id beyond the vocabulary.
    """
    top = max((output.k for output in outputs if output.name == "top_k"), default=0)
    if top > vocab_size:
        raise ValueError(f"top_k:{top}: got more than the {vocab_size} tokens of the model; ask for fewer")
    columns = sorted(output.ids for output in outputs if output.name == "log_probs_at")
    at = {name: _ids(name, batch, trained, vocab_size) for name in columns}
    return learn.Wanted(any(output.name == "entropy" for output in outputs), top, at)


def _ids(name: str, batch: learn.PackedBatch, trained: Tensor, vocab_size: int) -> Tensor:
    """Return a column's token ids at the trained positions, [trained, k]."""
    ids = batch.column(name)[trained].long()
    if ids.dim() != 2:
        raise ValueError(f"log_probs_at:{name}: got ids of shape {list(ids.shape)}; the column must be [tokens, k]")
    if ids.numel() and not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise ValueError(
            f"log_probs_at:{name}: got ids from {int(ids.min())} to {int(ids.max())}; the model has 0 to {vocab_size - 1}"
        )
    return ids
