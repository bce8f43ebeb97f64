# SPDX-License-Identifier: Apache-2.0
"""Access to the TransferQueue package, with shorter timeouts and a chosen address for its servers.

The package reads its limits from the environment at import, and always binds to the node's address. Its servers decode
pickles, so on one machine they bind to the loopback address instead. Only this module uses the package's internals.
"""

from __future__ import annotations

import os
from typing import Any

LIMITS = {
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "30",
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "1",
    "TQ_SIMPLE_STORAGE_PROBE_TIMEOUT": "2",
    "TQ_DATA_UPDATE_RESPONSE_TIMEOUT": "30",
    "TQ_CLIENT_ZMQ_IO_THREADS": "2",
    "TQ_NUM_THREADS": "1",
    "TQ_LOGGING_LEVEL": "CRITICAL",
}
"""Limits of the package, whose defaults wait ten minutes for a dead server. Logs are off; this plugin raises errors."""


def load() -> None:
    """Import the package with `LIMITS`, except for variables that the environment sets already."""
    for name, value in LIMITS.items():
        os.environ.setdefault(name, value)
    import transfer_queue  # noqa: F401


def serve_controller(address: str) -> Any:
    """Run the package's metadata server in threads of this process, and return it."""
    load()
    import transfer_queue.controller as module

    return _bound(module, address, module.TransferQueueController)


def serve_unit(address: str) -> Any:
    """Run a storage server in threads of this process, and return it."""
    load()
    import transfer_queue.storage.simple_storage as module

    return _bound(module, address, module.SimpleStorageUnit, {"num_data_storage_units": 1})


def _bound(module: Any, address: str, actor: Any, *arguments: Any) -> Any:
    """Return an instance of the class that Ray's decorator wraps, with its servers bound to `address`."""
    module.get_node_ip_address = lambda: address
    return actor.__ray_metadata__.modified_class(*arguments)


def connect(name: str, controller: dict[str, Any], units: list[dict[str, Any]]) -> Any:
    """Return a client of servers, given their descriptions by `describe`. Blocks during the handshake."""
    load()
    from transfer_queue.client import AsyncTransferQueueClient

    client = AsyncTransferQueueClient(name, _info(controller))
    try:
        client.initialize_storage_manager("SimpleStorage", {"zmq_info": {unit["id"]: _info(unit) for unit in units}})
    except BaseException:
        client.close()
        raise
    return client


def describe(server: Any) -> dict[str, Any]:
    """Return role, id and addresses of a server as plain data."""
    info = server.get_zmq_server_info()
    return {"role": info.role.value, "id": info.id, "ip": info.ip, "ports": dict(info.ports)}


def _info(address: dict[str, Any]) -> Any:
    from transfer_queue.utils.enum_utils import Role
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    return ZMQServerInfo(Role(address["role"]), address["id"], address["ip"], address["ports"])
