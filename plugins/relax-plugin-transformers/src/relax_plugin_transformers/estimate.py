# SPDX-License-Identifier: Apache-2.0
"""Estimates of an engine's memory and work, by arithmetic on `config.json` and the headers of the weight files.

The estimate follows the generation of rows of maximum length through the phases of `Batch` and `RowsCache`: prompts run
pass by pass, their caches are copied to their samples, and the cache grows. The result is the phase with most memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.api.engine import EngineSpec
from relax_core.api.plan import RESERVED, Estimate, Workload
from relax_plugin_transformers.loading import read_config
from relax_plugin_transformers.options import TransformersOptions
from relax_plugin_transformers.reservation import AHEAD, grown, rounded

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CDF_ELEMENTS = 1 << 24
"""Maximum number of float64 values that sampling sums at once."""

_ALLOCATOR, _BUFFERS = 0.2, 20 << 20
"""Memory on a CPU in addition to tensors: malloc's overhead as a share of the tensors of a generation, and bytes of
buffers of matrix products. Measured (docs/benchmarks.md)."""

Parts = dict[str, int]


@dataclass(frozen=True, slots=True)
class _Model:
    """Sizes of a model that determine its memory."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    bytes: int
    """Bytes of one weight."""

    @classmethod
    def of(cls, config: Mapping[str, Any], number: int) -> _Model:
        try:
            layers, hidden, vocab = (int(config[name]) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
            inner, heads = int(config["intermediate_size"]), int(config["num_attention_heads"])
        except KeyError as lacking:
            raise NotImplementedError(f"config.json has no {lacking}") from None
        head = int(config.get("head_dim") or hidden // heads)
        return cls(layers, hidden, inner, heads, int(config.get("num_key_value_heads") or heads), head, vocab, number)

    @property
    def cell(self) -> int:
        """Bytes of a token's keys, or of its values, in one layer."""
        return self.kv_heads * self.head * self.bytes

    @property
    def token(self) -> int:
        """Bytes of a token in the cache of all layers."""
        return self.layers * 2 * self.cell

    def computed(self, tokens: int, width: int, eager: bool) -> int:
        """Return the bytes alive at once while a layer computes `tokens` tokens that see `width` columns each."""
        around = 2 * self.head + 2 * 8 // self.bytes  # rotary embeddings, positions and token ids
        block = 4 * self.hidden + 3 * self.inner + around  # embeddings, input, output and normed hidden states
        attention = 3 * self.hidden + (3 * self.heads + 2 * self.kv_heads) * self.head + around
        scores = 2 * 4 * tokens * self.heads * width if eager else 0
        return max(tokens * block * self.bytes, tokens * attention * self.bytes + scores)


def estimate(spec: EngineSpec, options: TransformersOptions, work: Workload) -> Estimate:
    """Estimate an engine's memory in each phase, and its floating-point operations.

    Raises NotImplementedError if `config.json` lacks the usual keys, or if the weights are not safetensors.
    """
    whole = read_config(spec.model)
    config: Mapping[str, Any] = whole.get("text_config", whole)
    number = _BYTES[_dtype(spec, config)]
    model = _Model.of(config, number)
    elements = _elements(Path(str(spec.model["path"])))
    weights, rows = elements * number, _rows(spec, options, work)
    moments = list(_moments(model, options, work, rows))
    if spec.model.get("head_dtype") == "float32" and number < 4:  # a pass copies the head, and frees it before drawing
        head, logits = 4 * model.vocab * model.hidden, 4 * rows * model.vocab
        passes = [parts for parts in moments if "activations" in parts]
        moments += [{**parts, "logits": min(parts["logits"], logits), "head": head} for parts in passes]
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    if _on_cpu(options):
        fullest[RESERVED] = _BUFFERS + round(_ALLOCATOR * sum(fullest.values()))
    cache = max(parts["kv cache"] for parts in moments)
    flops = 2.0 * elements * (work.rows * work.new_tokens + work.prompts * work.prompt_tokens)
    seen = work.rows * work.new_tokens * (work.prompt_tokens + work.new_tokens / 2)
    flops += 4.0 * model.layers * model.heads * model.head * seen
    return Estimate(
        {
            "generate": {"parameters": weights, **fullest},
            "load": {"parameters": weights, "staged": weights, "kv cache": cache},
        },
        {"generate": flops},
        _notes(work, rows),
    )


def _on_cpu(options: TransformersOptions) -> bool:
    if options.device != "auto":
        return options.device == "cpu"
    import torch

    return not torch.cuda.is_available()


def _notes(work: Workload, rows: int) -> tuple[str, ...]:
    first = f"for {rows} rows at once, each of maximum length"
    joined = "if rows join a batch from which rows leave early, the cache can be up to half as large again"
    return (first,) if rows >= work.rows else (first, joined)


def _moments(model: _Model, options: TransformersOptions, work: Workload, rows: int) -> Iterator[Parts]:
    """Yield the memory in use in addition to the weights, at each point where it may peak."""
    eager, group = options.attention == "eager", max(1, work.group_size)
    prompts, at_once = -(-rows // group), max(1, options.max_prefill_tokens // max(1, work.prompt_tokens))
    each, ahead = min(prompts, at_once), work.prompt_tokens + min(AHEAD, work.new_tokens)
    passed = min(each * work.prompt_tokens, options.max_prefill_tokens)
    columns, reserved = rounded(ahead), 0
    for first in range(0, prompts, each):
        ran, come = min(each, prompts - first), min(rows - first * group, each * group)
        held = reserved * columns * model.token
        prompt = ran * rounded(work.prompt_tokens) * model.token
        computed = model.computed(passed, work.prompt_tokens, eager)
        yield {"kv cache": held + prompt, "activations": computed, "logits": 4 * ran * model.vocab}
        new = come * columns * model.token
        picked = come * work.prompt_tokens * model.cell + prompt // (2 * model.layers)
        yield {"kv cache": held + new + picked, "logits": 4 * ran * model.vocab}
        yield {"kv cache": held + new, "logits": 4 * ran * model.vocab + _drawn(come, model.vocab)}
        before, reserved = reserved, grown(reserved, min(rows, first * group + come))
        if before:
            yield {"kv cache": (reserved * columns) * model.token + new + before * columns * model.cell}
    yield from _decoding(model, work, rows, reserved, columns)


def _decoding(model: _Model, work: Workload, rows: int, reserved: int, columns: int) -> Iterator[Parts]:
    """Yield the memory in use at the peaks of decoding."""
    needed = work.row_tokens - 1
    while columns < needed:
        old, columns = columns, rounded(grown(columns, columns + 1))
        yield {"kv cache": reserved * (columns * model.token + old * model.cell)}
    cache, history = reserved * columns * model.token, 2 * 8 * rows * needed
    yield {"kv cache": cache, "activations": history, "logits": _drawn(rows, model.vocab)}


def _drawn(rows: int, vocab: int) -> int:
    """Return the bytes that sampling takes: logits, log-probs, and their cumulative sums in float64."""
    return rows * vocab * 4 * 2 + min(rows * vocab, _CDF_ELEMENTS) * 8 * 2


def _dtype(spec: EngineSpec, config: Mapping[str, Any]) -> str:
    wanted = str(spec.model.get("dtype") or "auto")
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return stored if wanted == "auto" else wanted


def _rows(spec: EngineSpec, options: TransformersOptions, work: Workload) -> int:
    most = min(spec.max_concurrency or options.max_batch_rows, options.max_batch_tokens // max(1, work.row_tokens))
    return max(1, min(work.rows, most))


def _elements(folder: Path) -> int:
    """Return the number of elements of all weights, from the headers of the weight files."""
    count = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                elements = 1
                for length in entry["shape"]:
                    elements *= int(length)
                count += elements
    if not count:
        raise NotImplementedError("the model folder has no safetensors weights")
    return count
