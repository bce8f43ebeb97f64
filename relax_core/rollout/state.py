# SPDX-License-Identifier: Apache-2.0
"""Keys of states: where turns of different samples of a task began in the same one, their keys are equal.

A state has the environment's name for it (`Observation.state`); else it is what the policy was shown since it last
spoke. It is no cache key of tokens: the same words are the same state whatever stands before them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

from relax_core.api.task import Message


def state_key(name: str, shown: Sequence[Message], tokens: Sequence[int]) -> int:
    """A signed 64-bit number. Where nothing was shown either, the state is all that was said: `tokens`."""
    if name:
        return _digest("name", name)
    if shown:
        return _digest("shown", *(text for message in shown for text in _texts(message)))
    return _digest("tokens", array("q", tokens).tobytes())


def _texts(message: Message) -> tuple[str, ...]:
    """What tells two messages apart; media by their references."""
    content = message.content
    parts = [("", content)] if isinstance(content, str) else [
        (part.media.kind, part.media.reference) if part.media else ("", part.text) for part in content
    ]  # fmt: skip
    return (message.role, message.name, str(len(parts)), *chain.from_iterable(parts))


def _digest(*texts: str | bytes) -> int:
    digest = blake2b(digest_size=8)
    for text in texts:
        encoded = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(digest.digest(), "big", signed=True)
