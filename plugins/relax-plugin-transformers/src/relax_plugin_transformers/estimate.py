# SPDX-License-Identifier: Apache-2.0
"""What an engine will need, by arithmetic on `config.json` and the headers of the weights: nothing heavy is imported.

The cache is sized as `RowsCache` grows, for rows that are all as long as they may become.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_core.api.engine import EngineSpec
from relax_core.api.estimate import Estimate, Workload
from relax_plugin_transformers.loading import read_config
from relax_plugin_transformers.options import TransformersOptions

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ROUND, _AHEAD = 16, 64
"""As the cache reserves columns."""
_CDF_ELEMENTS = 1 << 24
"""Doubles that a draw sums at a time."""


def estimate(spec: EngineSpec, options: TransformersOptions, work: Workload) -> Estimate:
    """Raises NotImplementedError where `config.json` does not have the usual names."""
    whole = read_config(spec.model)
    config: Mapping[str, Any] = whole.get("text_config", whole)
    try:
        layers, hidden, vocab = (int(config[name]) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
        inner, heads = int(config["intermediate_size"]), int(config["num_attention_heads"])
    except KeyError as lacking:
        raise NotImplementedError(f"config.json has no {lacking}") from None
    head = int(config.get("head_dim") or hidden // heads)
    size = _BYTES[_dtype(spec, options, config)]
    weights = _elements(Path(str(spec.model["path"]))) * size
    rows = _rows(spec, options, work)
    cache = rows * _columns(work) * layers * 2 * int(config.get("num_key_value_heads") or heads) * head * size
    logits = rows * vocab * 4 * 2 + min(rows * vocab, _CDF_ELEMENTS) * 8 * 2
    prefill = min(options.max_prefill_tokens, work.prompts * work.prompt_tokens) * (2 * hidden + 3 * inner) * size
    generate = {"parameters": weights, "kv cache": cache + cache // layers, "logits": logits, "activations": prefill}
    flops = 2.0 * weights / size * (work.rows * work.new_tokens + work.prompts * work.prompt_tokens)
    flops += 4.0 * layers * heads * head * work.rows * work.new_tokens * (work.prompt_tokens + work.new_tokens / 2)
    return Estimate(
        {"generate": generate, "load": {"parameters": weights, "staged": weights, "kv cache": cache}},
        {"generate": flops},
        (f"{rows} rows at once, each as long as it may become",),
    )


def _dtype(spec: EngineSpec, options: TransformersOptions, config: Mapping[str, Any]) -> str:
    wanted = options.dtype or str(spec.model.get("dtype") or "auto")
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return stored if wanted == "auto" else wanted


def _rows(spec: EngineSpec, options: TransformersOptions, work: Workload) -> int:
    most = min(spec.max_concurrency or options.max_batch_rows, options.max_batch_tokens // max(1, work.row_tokens))
    return max(1, min(work.rows, most))


def _columns(work: Workload) -> int:
    """Reserved when the last token is sampled: they grow by half."""
    columns = _rounded(work.prompt_tokens + min(_AHEAD, work.new_tokens))
    while columns < work.row_tokens:
        columns = _rounded(columns * 3 // 2)
    return columns


def _rounded(columns: int) -> int:
    return -(-columns // _ROUND) * _ROUND


def _elements(folder: Path) -> int:
    """Of all weights, by the headers of their files."""
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
        raise NotImplementedError("its weights are not safetensors")
    return count
