# SPDX-License-Identifier: Apache-2.0
"""The TransferQueue package, as this plugin uses it: its waits are short, and its servers bind where they are told.

The package reads its limits from the environment when it is imported, and binds to the node's address without a choice;
what it decodes may be a pickle, so on one machine that is the loopback's. This is the only module that reaches into it.
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
"""Its own defaults wait ten minutes for a storage that is gone. What it logs as errors, we raise."""


def load() -> None:
    """Import it with these limits; an environment that names others keeps them."""
    for name, value in LIMITS.items():
        os.environ.setdefault(name, value)
    import transfer_queue  # noqa: F401


def serve_controller(address: str) -> Any:
    """Serve the package's metadata server in threads of this process."""
    load()
    import transfer_queue.controller as module

    return _bound(module, address, module.TransferQueueController)


def serve_unit(address: str) -> Any:
    """One of its storage servers, in threads of this process."""
    load()
    import transfer_queue.storage.simple_storage as module

    return _bound(module, address, module.SimpleStorageUnit, {"num_data_storage_units": 1})


def _bound(module: Any, address: str, actor: Any, *arguments: Any) -> Any:
    """The class under Ray's decorator, made with its servers at this address."""
    module.get_node_ip_address = lambda: address
    return actor.__ray_metadata__.modified_class(*arguments)


def connect(name: str, controller: dict[str, Any], units: list[dict[str, Any]]) -> Any:
    """A client of servers that are described by `describe`. Blocks during the handshake."""
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
    """Describe the place of a server as plain data."""
    info = server.get_zmq_server_info()
    return {"role": info.role.value, "id": info.id, "ip": info.ip, "ports": dict(info.ports)}


def _info(told: dict[str, Any]) -> Any:
    from transfer_queue.utils.enum_utils import Role
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    return ZMQServerInfo(Role(told["role"]), told["id"], told["ip"], told["ports"])
