# SPDX-License-Identifier: Apache-2.0
"""A single-file plugin for the benchmark of sinks: every sink of this repository, working in every other block of steps.

So one run has steps with all sinks and steps without, and what changes on the machine meanwhile changes both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_plugin_clearml.sink import ClearML
from relax_plugin_mlflow.sink import Mlflow
from relax_plugin_opentelemetry.sink import OpenTelemetry
from relax_plugin_prometheus.sink import Prometheus
from relax_plugin_swanlab.sink import SwanLab
from relax_plugin_tensorboard.sink import TensorBoard
from relax_plugin_trackio.sink import Trackio
from relax_plugin_wandb.sink import WeightsAndBiases

from relax_core.api import Sink, Span

BLOCK = 8
"""Number of steps in a block; the sinks work in the second block, the fourth, and so on."""


def works(step: int) -> bool:
    """Return True for a step in whose block the sinks work."""
    return (step - 1) // BLOCK % 2 == 1


class _Gated(Sink[Any]):
    """Passes a sink only the calls of the steps in which it works."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if works(step):
            super().metrics(step, values)  # type: ignore[safe-super]

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if works(step):
            super().samples(step, samples)

    def spans(self, step: int, spans: Sequence[Span]) -> None:
        if works(step):
            super().spans(step, spans)


class GatedTensorboard(_Gated, TensorBoard):
    """TensorBoard in every other block of steps."""


class GatedPrometheus(_Gated, Prometheus):
    """Prometheus in every other block of steps."""


class GatedOpentelemetry(_Gated, OpenTelemetry):
    """OpenTelemetry in every other block of steps."""


class GatedWandb(_Gated, WeightsAndBiases):
    """Weights & Biases in every other block of steps."""


class GatedMlflow(_Gated, Mlflow):
    """MLflow in every other block of steps."""


class GatedTrackio(_Gated, Trackio):
    """Trackio in every other block of steps."""


class GatedSwanlab(_Gated, SwanLab):
    """SwanLab in every other block of steps."""


class GatedClearml(_Gated, ClearML):
    """ClearML in every other block of steps."""
