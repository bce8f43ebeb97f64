# SPDX-License-Identifier: Apache-2.0
"""Starting of SGLang's scheduler in this process, from the engine's spec and options."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_default_distributed_backend
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.network import get_free_port_below_ephemeral

from relax_core.api.engine import EngineSpec
from relax_core.api.errors import ConfigError, InfrastructureError
from relax_plugin_sglang.environment_variables import on_gpu
from relax_plugin_sglang.options import SglangOptions
from relax_plugin_sglang.scheduler import SteppedScheduler

CPU_KV_TOKENS = 32768
INTERFACE = "GLOO_SOCKET_IFNAME"
SPARE = 8
"""Number of positions added to the context, because SGLang reserves a few positions for itself."""
_launched: list[str] = []


def launch(spec: EngineSpec, options: SglangOptions) -> SteppedScheduler:
    """Start a scheduler, once per process, since SGLang keeps configuration and process groups in globals.

    Raises InfrastructureError for a second launch, and ConfigError for arguments that SGLang refuses.
    """
    if _launched:
        raise InfrastructureError(
            f"{spec.name}: this process runs SGLang already (for {_launched[0]}); start another process"
        )
    arguments = ServerArgs(**arguments_of(spec, options))
    try:
        arguments.resolve_once()
        arguments.check_server_args()
    except (ValueError, AssertionError) as error:
        raise ConfigError("engine.server_args", str(error), "correct it by SGLang's server arguments") from error
    _launched.append(spec.name)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    with _gloo_on_loopback():
        # SGLang uses an existing process group. The store of SGLang's own group would listen on every interface, without
        # authentication, so this group of one process has a store in memory.
        backend = get_default_distributed_backend(arguments.device)
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        # No socket is opened; the free port only becomes a part of the names of shared memory.
        ports = PortArgs(
            tokenizer_ipc_name="", scheduler_input_ipc_name="", detokenizer_ipc_name="", rpc_ipc_name="",
            metrics_ipc_name="", tokenizer_worker_ipc_name=None, decoupled_spec_ipc_config=None,
            nccl_port=get_free_port_below_ephemeral(),
        )  # fmt: skip
        return SteppedScheduler(arguments, ports)


def replays(spec: EngineSpec) -> bool:
    """Return True if the run replays the routing. Only then are experts recorded, which costs memory per cached token."""
    return spec.model.get("routing_replay") == "rollout"


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """Let process groups that are made within the context listen on loopback only.

    gloo's default is the host name's interface. Later groups, for weights from remote hosts, choose their interface.
    """
    before = os.environ.get(INTERFACE)
    os.environ[INTERFACE] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    try:
        yield
    finally:
        if before is None:
            del os.environ[INTERFACE]
        else:
            os.environ[INTERFACE] = before


def arguments_of(spec: EngineSpec, options: SglangOptions) -> dict[str, Any]:
    gpu = on_gpu()
    bounded = spec.max_context < 1 << 24
    tokens = options.kv_cache_tokens or (None if gpu else CPU_KV_TOKENS)
    if tokens is not None and bounded:
        tokens = max(tokens, spec.max_context + SPARE)
    arguments: dict[str, Any] = {
        "model_path": spec.model["path"], "skip_tokenizer_init": True, "dtype": spec.model.get("dtype") or "auto",
        "device": "cuda" if gpu else "cpu", "random_seed": spec.seed & 0x7FFFFFFF, "log_level": "warning",
        "context_length": spec.max_context + SPARE if bounded else None, "max_total_tokens": tokens,
        "max_running_requests": spec.max_concurrency or options.max_batch_rows,
        "chunked_prefill_size": options.max_prefill_tokens, "mem_fraction_static": options.gpu_memory if gpu else None,
        # If kv_across_versions is set, a shared cache could outlive the weights that computed it.
        "disable_radix_cache": not options.prefix_cache or spec.kv_across_versions,
        # A step must end before the next begins, so that weights change between two tokens.
        "disable_overlap_schedule": True, "disable_cuda_graph": not (gpu and options.graphs),
        "attention_backend": options.attention or (None if gpu else "torch_native"),
        "enable_return_routed_experts": replays(spec),
        "enable_fp32_lm_head": spec.model.get("head_dtype") == "float32",
    }  # fmt: skip
    return {**{name: value for name, value in arguments.items() if value is not None}, **options.server_args}
