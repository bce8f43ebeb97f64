# SPDX-License-Identifier: Apache-2.0
"""Limits on what callers send to the HTTP servers of Relax: the time for the head of a request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as AutoHTTPProtocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S = 10.0
"""Seconds for a whole head of a request, from the connection or from the first byte of a later request."""


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
