# SPDX-License-Identifier: Apache-2.0
"""The address that a transport listens on, which is also the one its receivers are told: one that means itself everywhere."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator


def _reachable(host: str) -> str:
    try:
        anywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        anywhere = not host.strip()
    if anywhere:
        raise ValueError("name the sender's own address: receivers are told it, and can't reach this one")
    return host


Host = Annotated[str, AfterValidator(_reachable)]
