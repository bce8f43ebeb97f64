# SPDX-License-Identifier: Apache-2.0
"""SGLang's scheduler without its sockets and its loop: the engine's thread steps it and reads a list of results.

The subclass overrides SGLang's extension points and `init_ipc_channels`. Scheduling, caches and model are SGLang's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.server_args import PortArgs, ServerArgs

from relax_plugin_sglang.sampler import DrawingSampler, Row


class _NullSocket:
    """A replacement for SGLang's sockets that sends nothing."""

    def send_output(self, *_: Any) -> None:
        pass


class _CollectedOutputs(SchedulerOutputStreamer):
    """An output streamer that keeps the requests with new tokens in a list, instead of sending them."""

    updated: list[Req]

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        for req in reqs:
            if req is not skip_req and not (req.finished() and req.finished_output):
                req.finished_output = req.finished()
                self.updated.append(req)


class SteppedScheduler(Scheduler):
    """SGLang's scheduler with one model. The thread that creates the scheduler must also step it."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        self.updated: list[Req] = []
        """Requests that got a new token or ended in a step since the list was last cleared."""
        self._rows: dict[str, Row] = {}
        super().__init__(server_args, port_args)
        runner = self.tp_worker.model_runner
        self.sampler = DrawingSampler(self.model_config.vocab_size)
        runner.sampler = self.sampler
        self.output_streamer.updated = self.updated

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None, recv_from_rpc=None, send_to_tokenizer=_NullSocket(), send_to_detokenizer=_NullSocket(),
            send_metrics_from_scheduler=None,
        )  # fmt: skip
        self.recv_from_tokenizer = self.load_snapshot_writer = None

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return _CollectedOutputs

    def take(self, request: TokenizedGenerateReqInput, row: Row) -> None:
        """Queue a request with its state for the sampler."""
        self._rows[request.rid] = row
        if self.is_fully_idle():  # as in SGLang's idle loop: drop the memory estimate learned from earlier requests
            self.new_token_ratio_tracker.reset()
        self.handle_generate_request(request)

    def _create_generation_req(self, recv_req: TokenizedGenerateReqInput, *args: Any, **kwargs: Any) -> Req:
        # A request stops only at its own stop tokens, not at the model folder's.
        given: Mapping[str, Any] = {**kwargs, "eos_token_ids": None}
        req = super()._create_generation_req(recv_req, *args, **given)
        req.row = self._rows.pop(recv_req.rid)
        return req

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.sampler.reqs = list(batch.reqs)
        return super().run_batch(batch, *args, **kwargs)

    def step(self) -> None:
        """Run one iteration of SGLang's loop: run the next batch, if there is one, and process its results."""
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        self.cur_batch_for_debug = batch
        if batch:
            self.process_batch_result(batch, self.run_batch(batch))
        self.last_batch = batch
