# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.benchmarks NAME [options]` runs one benchmark; `tox -e bench -- NAME` in an environment of its own."""

from __future__ import annotations

import importlib
import sys

NAMES = (
    "bus", "weights", "overlap", "overhead", "modes", "learning", "trainer", "trl", "samples", "router", "engines",
    "recipes", "soak", "routing", "mismatch", "media", "recovery", "sandbox", "gateway", "agents", "stop_texts",
    "device", "sinks", "scaling", "megatron",
)  # fmt: skip
ON_GPU = {
    "trainer": ("--models", "0.5B", "--ranks", "1", "--repeats", "3"),
    "device": ("--models", "0.5B", "--device", "cuda"),
}
"""Arguments of the benchmarks that `scripts/gpu-check` runs on a GPU."""


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(f"usage: python -m tests.benchmarks {{{','.join(NAMES)}}} [--help]", file=sys.stderr)
        return 2
    name = sys.argv.pop(1)
    importlib.import_module(f"tests.benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
