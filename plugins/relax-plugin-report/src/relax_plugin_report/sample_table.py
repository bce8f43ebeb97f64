# SPDX-License-Identifier: Apache-2.0
"""A step's samples as a table of text: reward, length, prompt and response."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relax_core.api.errors import printable
from relax_core.api.events import sample_turns

LONGEST_PROMPT, LONGEST_RESPONSE = 240, 480
"""Most characters of a cell; the middle of a longer text is left out."""


def chosen(samples: Sequence[Mapping[str, Any]], best: bool, worst: bool, evaluation: bool) -> list[Mapping[str, Any]]:
    """Return the samples of training or of evaluations, sorted by reward if asked; samples without a reward come last."""
    wanted = [sample for sample in samples if (sample.get("purpose") == "eval") == evaluation]
    if not (best or worst):
        return wanted
    judged = [sample for sample in wanted if sample.get("reward") is not None]
    others = [sample for sample in wanted if sample.get("reward") is None]
    return sorted(judged, key=lambda sample: float(sample["reward"]), reverse=best) + others


def sample_table(samples: Sequence[Mapping[str, Any]], width: int, whole: bool = False) -> str:
    """Return the samples as a table of `width` columns. `whole`: texts are not shortened."""
    table = Table(box=None, padding=(0, 2, 1, 0), pad_edge=False)
    for head, justify in (("reward", "right"), ("tokens", "right"), ("prompt", "left"), ("response", "left")):
        table.add_column(head, justify=justify, overflow="fold", no_wrap=head in ("reward", "tokens"))  # type: ignore[arg-type]
    for sample in samples:
        turns = sample_turns(sample)
        response = turns.pop()[1] if sample.get("response") is not None else ""
        prompt = turns[-1][1] if len(turns) == 1 else "\n".join(f"{role}: {text}" for role, text in turns)
        reward = sample.get("reward")
        shown = str(sample.get("outcome") or "none") if reward is None else f"{reward:.3g}"
        cells = (prompt, response) if whole else (_cut(prompt, LONGEST_PROMPT), _cut(response, LONGEST_RESPONSE))
        table.add_row(shown, str(sample.get("num_tokens", "")), *(Text(printable(cell).rstrip()) for cell in cells))
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()


def _cut(text: str, longest: int) -> str:
    """Return a text without its middle, since the end of a response has the answer."""
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
