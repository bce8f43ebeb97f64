# SPDX-License-Identifier: Apache-2.0
"""A receiver in a process of its own: takes a version, on the second GPU if asked; may stop or die after its first tensor."""

from __future__ import annotations

import os
import signal
import sys

from relax_plugin_network_weights.collective import Collective, CollectiveOptions

from relax_core.api.errors import RelaxError
from relax_core.api.weights import combined_fingerprint
from relax_core.rpc import messages


def main(behaviour: str) -> None:
    manifest = messages.decode(sys.stdin.buffer.read())
    if behaviour == "gpu":
        import torch

        torch.cuda.set_device(1)
        torch.cuda.init()
    transport, infos = Collective(CollectiveOptions(bucket_mb=1, silence_s=3.0)), []
    try:
        for info, _ in transport.receive(manifest):
            infos.append(info)
            if behaviour == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if behaviour == "dies":
                os._exit(9)
    except (RelaxError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return
    print(combined_fingerprint(infos), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
