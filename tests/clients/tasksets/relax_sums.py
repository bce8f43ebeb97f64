# SPDX-License-Identifier: Apache-2.0
"""A taskset for the real verifiers: sums whose answer must occur in what was said."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if "raise" in trace.last_reply:
            raise RuntimeError("scoring broke")
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.25)
    async def style(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.endswith("."))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask]):
    def load(self) -> Iterator[SumTask]:
        for at in range(3):
            yield SumTask(SumData(prompt=f"What is {at} + 1?", answer=str(at + 1)), self.config.task)
