# SPDX-License-Identifier: Apache-2.0
"""A tokenizer with one token per character, for model folders of tests that only count tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers


def save_ascii_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` into a new folder: `<end>` is 0, `<unk>` 1, and an ASCII character its code."""
    vocabulary = {"<end>": 0, "<unk>": 1, **{chr(code): code for code in range(10, 127)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
