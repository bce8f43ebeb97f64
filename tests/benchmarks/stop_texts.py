# SPDX-License-Identifier: Apache-2.0
"""The time that stop texts cost, by the length of an answer: watched token by token, then cut at the stop text."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from relax_plugin_chat.chat import ChatFamily

from relax_contrib.recipes.quickstart.model import save_tokenizer
from relax_core.engines.requests import stop_end, watch_for

LENGTHS = (1_000, 4_000, 16_000)


def main() -> None:
    """Print a line per length: seconds of the watch of all tokens, and of the cut."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        family = ChatFamily()
        family.open({"path": folder})
        print("tokens  watch_s  cut_s")
        for length in parser.parse_args().lengths:
            watch_s, cut_s = _measured(family, length)
            print(f"{length:>6}  {watch_s:.4f}  {cut_s:.4f}")


def _measured(family: ChatFamily, length: int) -> tuple[float, float]:
    last = family.encode("2")
    tokens = [*(family.encode("1") * length)[: length - 1], *last]
    watch = watch_for(("2",), family.decode)
    assert watch is not None
    began = time.perf_counter()
    said: list[int] = []
    for token in tokens:
        said.append(token)
        watch(said)
    watched = time.perf_counter()
    assert stop_end(tokens, ("2",), family.decode) == length
    return watched - began, time.perf_counter() - watched
