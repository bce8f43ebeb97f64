# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the recipes' builders: their command line, and saving a tokenizer."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

Made = TypeVar("Made")


def made(build: Callable[[Path, int], Made], doc: str | None) -> Made:
    """Run `build` with the folder and seed of the command line, in one thread, and return its result."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    return build(arguments.folder, arguments.seed)


def untrained() -> bool:
    """Return True for `relax plan`, which needs only the sizes of models: a builder then skips its warm start."""
    return bool(os.environ.get("RELAX_UNTRAINED"))


def save_tokenizer(tokenizer: Any, special: Sequence[str], template: str, folder: Path) -> Any:
    """Add special tokens to a `tokenizers.Tokenizer`, save it with a chat template, and return it."""
    from tokenizers import AddedToken

    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
        "unk_token": "<unk>", "padding_side": "left", "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration, indent=1))
    return tokenizer
