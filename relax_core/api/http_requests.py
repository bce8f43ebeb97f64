# SPDX-License-Identifier: Apache-2.0
"""Limits on what callers send to the HTTP servers of Relax: the time for a head, and the items and numbers of JSON."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as AutoHTTPProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S = 10.0
"""Seconds for a whole head of a request, from the connection or from the first byte of a later request."""
MAX_ITEMS = 500_000
"""Most brackets and commas of a JSON body; parsing more would hold up the process, because it can't be interrupted."""
MAX_DIGITS = 20
"""Most characters of a whole number, which must have at most 64 bits."""


def parse_json(text: str | bytes, max_items: int = MAX_ITEMS) -> Any:
    """Parse JSON that a caller sent. Raises ValueError with the reason, also for numbers that no process can receive.

    Strings count, too: a bracket or comma in a text is one of `max_items`.
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    items = len(data) - len(data.translate(None, b"[{,"))  # one pass, unlike `count`
    if items > max_items:
        raise ValueError(f"it has {items} brackets and commas; send at most {max_items}")
    try:
        text = text if isinstance(text, str) else text.decode()
        return json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError("its lists and objects are nested too deeply") from error


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS or not -(1 << 63) <= int(text) < 1 << 64:
        raise ValueError(f"got the number {text[:MAX_DIGITS]}... of {len(text)} characters; send at most 64 bits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"got the number {text[:MAX_DIGITS]}; send finite numbers")
    return number


class HeadDeadline(AutoHTTPProtocol):
    """uvicorn's protocol, which also closes connections whose request has no whole head after HEAD_S seconds."""

    _answered: Any = None
    """The request before the head that is awaited; None before the first request."""
    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answered = self.cycle is not None and self.cycle.response_complete
        if answered and self._answered is not self.cycle:
            self._await_head()

    def _await_head(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._answered = self.cycle
        self._closing = self.loop.call_later(HEAD_S, self.close_without_head)

    def close_without_head(self) -> None:
        """Close the connection unless a whole head has arrived since the timer was started."""
        if self.cycle is self._answered:
            self.transport.close()
