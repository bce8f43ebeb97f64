# SPDX-License-Identifier: Apache-2.0
"""The exported names and the module of each; a module is imported on first use of its names."""

# fmt: off
# isort: skip_file
from .forward import ForwardColumns as ForwardColumns, ForwardLoop as ForwardLoop, forward_lease as forward_lease
from .rank_group import RankGroup as RankGroup, TrainerDeviceLease as TrainerDeviceLease
from .step import StepTimes as StepTimes
from .step_trainer import StepTrainer as StepTrainer
