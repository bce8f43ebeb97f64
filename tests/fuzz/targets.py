# SPDX-License-Identifier: Apache-2.0
"""Entry points of the core that read what others wrote, each with valid inputs to mutate.

An input is a folder of small files, so that it can be kept and fed again. `feed` calls the functions that the command line
and the roles call; it may succeed or raise one of the target's refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from relax_core.api.errors import RelaxError
from tests.fuzz.configuration_inputs import (
    Files,
    configuration_input,
    feed_configuration,
    feed_model,
    model_input,
    override_input,
    sound_model,
)
from tests.fuzz.run_inputs import (
    checkpoint_input,
    documents_input,
    feed_checkpoints,
    feed_documents,
    feed_ledger,
    ledger_input,
    sound_documents,
)
from tests.fuzz.task_inputs import feed_medium, feed_tasks, lines_input, media_input, table_input
from tests.fuzz.wire_inputs import feed_frames, feed_http, feed_weights, frames_input, http_input, weights_input


@dataclass(frozen=True)
class Target:
    """One entry point."""

    make: Callable[[Random], Files]
    feed: Callable[[Path], None]
    refusals: tuple[type[Exception], ...] = (RelaxError,)
    """What it may raise."""
    share: int = 1
    """How many of the inputs are its own, beside those of the other targets."""
    heavy: tuple[str, ...] = ()
    """Modules that it imports when it is fed, which take longer than an input may."""
    sound: Callable[[], Files] = dict
    """Sound files of an input. A kept input replaces some of them."""


HEAVY = (
    "transformers.models.auto.configuration_auto",
    "relax_plugin_torch.trainer",
    "relax_plugin_transformers.plugin",
)
TARGETS: dict[str, Target] = {
    "configuration": Target(configuration_input, feed_configuration, share=8, heavy=HEAVY, sound=sound_model),
    "overrides": Target(override_input, feed_configuration, share=6, heavy=HEAVY, sound=sound_model),
    "model": Target(model_input, feed_model, share=4, heavy=HEAVY, sound=sound_model),
    "lines": Target(lines_input, feed_tasks, share=6),
    "tables": Target(table_input, feed_tasks, share=6),
    "media": Target(media_input, feed_medium, (RelaxError, ValueError), share=8),
    "checkpoints": Target(checkpoint_input, feed_checkpoints, share=6),
    "ledgers": Target(ledger_input, feed_ledger, share=4),
    "documents": Target(documents_input, feed_documents, share=4, heavy=HEAVY, sound=sound_documents),
    "weights": Target(weights_input, feed_weights, (RelaxError, ValueError), share=8),
    "frames": Target(frames_input, feed_frames, share=8),
    "http": Target(http_input, feed_http, (RelaxError, ValueError), share=1),
}
