# SPDX-License-Identifier: Apache-2.0
"""The contracts: everything a plugin may import, together with `relax_core.learn`.

Names load on first use, and none of them imports ray or torch; only `Options` imports pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "algorithm": (
        "Advantages", "Algorithm", "ENTROPY", "Groups", "LOG_PROBS", "Loss", "LossBatch", "Output", "PolicyOutputs", "Scope",
        "Source", "Term", "VALUES_OUTPUT", "log_probs_at", "top_k",
    ),
    "batch": ("AttemptId", "Cut", "Ragged", "RowBatch", "RowId"),
    "bus": (
        "Account", "Bus", "BusComponent", "BusSettings", "Claim", "ClaimRequest", "Issue", "PayloadStore", "Registration",
        "Sealed",
    ),
    "clock": ("Clock", "SystemClock"),
    "column": (
        "ADVANTAGES", "ALGORITHM_INDEX", "Column", "LOSS_MASK", "MARGINS", "OLD_LOG_PROBS", "OUTCOME", "REF_LOG_PROBS",
        "RETURNS", "REWARDS", "ROLLOUT_LOG_PROBS", "ROUTED_VALID", "STATES", "STEP_REWARDS", "TEACHER_INDEX",
        "TEACHER_LOG_PROBS", "TOKENS", "TURNS", "VALUES", "WEIGHT_VERSIONS", "routed_experts", "student_top_k_ids",
        "teacher_log_probs_at", "teacher_top_k",
    ),
    "component": ("Component", "Configurable"),
    "engine": ("Capabilities", "Delta", "Engine", "EngineSpec", "GenerateRequest", "Health"),
    "engine_hand": ("EngineHand", "Generated"),
    "environment": ("Action", "Environment", "Observation", "Session", "Step", "Tool"),
    "errors": (
        "ComeAgain", "ConfigError", "DeadlineExceeded", "InfrastructureError", "PluginError", "RelaxError", "StaleFence",
        "WorkerDied",
    ),
    "estimate": ("Estimate", "Workload"),
    "events": (
        "CheckpointSaved", "EvalFinished", "Event", "Logged", "RoleFailed", "RoleRecovered", "RolledBack", "RolloutMeasured",
        "RunFinished", "RunStarted", "SamplesScored", "StepFinished", "WeightsPublished",
    ),
    "family": ("ModelFamily", "Rendered"),
    "hooks": ("hook",),
    "kinds": ("KINDS", "Kind"),
    "modality": ("ModalityProcessor", "ProcessedMedia", "Span"),
    "options": ("Options",),
    "outcome": ("DropReason", "Outcome"),
    "reward": ("BatchReward", "GroupReward", "Reward", "Score"),
    "role": ("Context", "Operation", "Reads", "Role", "WeightService"),
    "routing": ("ROUTES", "Routing"),
    "scaling": ("Load", "ScalingPolicy"),
    "secret": ("Secret",),
    "sink": ("Sink",),
    "source": ("BadRow", "Filter", "Sampler", "TaskSource"),
    "status": ("Beat", "Board", "Command", "Wait"),
    "task": ("Media", "Message", "Part", "Task", "ToolCall"),
    "trainer": (
        "Chosen", "Chunk", "ChunkPlan", "OptimizerSpec", "Trainer", "TrainerSpec", "UpdateOutcome", "UpdateResult",
    ),
    "trajectory": ("Node", "Row", "Trajectory"),
    "turn": ("Sleeper", "Turn", "Turns"),
    "version": ("Version",),
    "weights": (
        "Canary", "Manifest", "Receipt", "TensorInfo", "WeightTransport", "combined_fingerprint", "tensor_fingerprint",
    ),
    "worker": ("Worker", "WorkerSpec", "Workers"),
}  # fmt: skip
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"relax_core.api has no {name!r}; it exports {', '.join(sorted(_MODULE))}")
    return getattr(importlib.import_module(f"relax_core.api.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULE)


if TYPE_CHECKING:
    from relax_core.api.algorithm import ENTROPY as ENTROPY
    from relax_core.api.algorithm import LOG_PROBS as LOG_PROBS
    from relax_core.api.algorithm import VALUES_OUTPUT as VALUES_OUTPUT
    from relax_core.api.algorithm import Advantages as Advantages
    from relax_core.api.algorithm import Algorithm as Algorithm
    from relax_core.api.algorithm import Groups as Groups
    from relax_core.api.algorithm import Loss as Loss
    from relax_core.api.algorithm import LossBatch as LossBatch
    from relax_core.api.algorithm import Output as Output
    from relax_core.api.algorithm import PolicyOutputs as PolicyOutputs
    from relax_core.api.algorithm import Scope as Scope
    from relax_core.api.algorithm import Source as Source
    from relax_core.api.algorithm import Term as Term
    from relax_core.api.algorithm import log_probs_at as log_probs_at
    from relax_core.api.algorithm import top_k as top_k
    from relax_core.api.batch import AttemptId as AttemptId
    from relax_core.api.batch import Cut as Cut
    from relax_core.api.batch import Ragged as Ragged
    from relax_core.api.batch import RowBatch as RowBatch
    from relax_core.api.batch import RowId as RowId
    from relax_core.api.bus import Account as Account
    from relax_core.api.bus import Bus as Bus
    from relax_core.api.bus import BusComponent as BusComponent
    from relax_core.api.bus import BusSettings as BusSettings
    from relax_core.api.bus import Claim as Claim
    from relax_core.api.bus import ClaimRequest as ClaimRequest
    from relax_core.api.bus import Issue as Issue
    from relax_core.api.bus import PayloadStore as PayloadStore
    from relax_core.api.bus import Registration as Registration
    from relax_core.api.bus import Sealed as Sealed
    from relax_core.api.clock import Clock as Clock
    from relax_core.api.clock import SystemClock as SystemClock
    from relax_core.api.column import ADVANTAGES as ADVANTAGES
    from relax_core.api.column import ALGORITHM_INDEX as ALGORITHM_INDEX
    from relax_core.api.column import LOSS_MASK as LOSS_MASK
    from relax_core.api.column import MARGINS as MARGINS
    from relax_core.api.column import OLD_LOG_PROBS as OLD_LOG_PROBS
    from relax_core.api.column import OUTCOME as OUTCOME
    from relax_core.api.column import REF_LOG_PROBS as REF_LOG_PROBS
    from relax_core.api.column import RETURNS as RETURNS
    from relax_core.api.column import REWARDS as REWARDS
    from relax_core.api.column import ROLLOUT_LOG_PROBS as ROLLOUT_LOG_PROBS
    from relax_core.api.column import ROUTED_VALID as ROUTED_VALID
    from relax_core.api.column import STATES as STATES
    from relax_core.api.column import STEP_REWARDS as STEP_REWARDS
    from relax_core.api.column import TEACHER_INDEX as TEACHER_INDEX
    from relax_core.api.column import TEACHER_LOG_PROBS as TEACHER_LOG_PROBS
    from relax_core.api.column import TOKENS as TOKENS
    from relax_core.api.column import TURNS as TURNS
    from relax_core.api.column import VALUES as VALUES
    from relax_core.api.column import WEIGHT_VERSIONS as WEIGHT_VERSIONS
    from relax_core.api.column import Column as Column
    from relax_core.api.column import routed_experts as routed_experts
    from relax_core.api.column import student_top_k_ids as student_top_k_ids
    from relax_core.api.column import teacher_log_probs_at as teacher_log_probs_at
    from relax_core.api.column import teacher_top_k as teacher_top_k
    from relax_core.api.component import Component as Component
    from relax_core.api.component import Configurable as Configurable
    from relax_core.api.engine import Capabilities as Capabilities
    from relax_core.api.engine import Delta as Delta
    from relax_core.api.engine import Engine as Engine
    from relax_core.api.engine import EngineSpec as EngineSpec
    from relax_core.api.engine import GenerateRequest as GenerateRequest
    from relax_core.api.engine import Health as Health
    from relax_core.api.engine_hand import EngineHand as EngineHand
    from relax_core.api.engine_hand import Generated as Generated
    from relax_core.api.environment import Action as Action
    from relax_core.api.environment import Environment as Environment
    from relax_core.api.environment import Observation as Observation
    from relax_core.api.environment import Session as Session
    from relax_core.api.environment import Step as Step
    from relax_core.api.environment import Tool as Tool
    from relax_core.api.errors import ComeAgain as ComeAgain
    from relax_core.api.errors import ConfigError as ConfigError
    from relax_core.api.errors import DeadlineExceeded as DeadlineExceeded
    from relax_core.api.errors import InfrastructureError as InfrastructureError
    from relax_core.api.errors import PluginError as PluginError
    from relax_core.api.errors import RelaxError as RelaxError
    from relax_core.api.errors import StaleFence as StaleFence
    from relax_core.api.errors import WorkerDied as WorkerDied
    from relax_core.api.estimate import Estimate as Estimate
    from relax_core.api.estimate import Workload as Workload
    from relax_core.api.events import CheckpointSaved as CheckpointSaved
    from relax_core.api.events import EvalFinished as EvalFinished
    from relax_core.api.events import Event as Event
    from relax_core.api.events import Logged as Logged
    from relax_core.api.events import RoleFailed as RoleFailed
    from relax_core.api.events import RoleRecovered as RoleRecovered
    from relax_core.api.events import RolledBack as RolledBack
    from relax_core.api.events import RolloutMeasured as RolloutMeasured
    from relax_core.api.events import RunFinished as RunFinished
    from relax_core.api.events import RunStarted as RunStarted
    from relax_core.api.events import SamplesScored as SamplesScored
    from relax_core.api.events import StepFinished as StepFinished
    from relax_core.api.events import WeightsPublished as WeightsPublished
    from relax_core.api.family import ModelFamily as ModelFamily
    from relax_core.api.family import Rendered as Rendered
    from relax_core.api.hooks import hook as hook
    from relax_core.api.kinds import KINDS as KINDS
    from relax_core.api.kinds import Kind as Kind
    from relax_core.api.modality import ModalityProcessor as ModalityProcessor
    from relax_core.api.modality import ProcessedMedia as ProcessedMedia
    from relax_core.api.modality import Span as Span
    from relax_core.api.options import Options as Options
    from relax_core.api.outcome import DropReason as DropReason
    from relax_core.api.outcome import Outcome as Outcome
    from relax_core.api.reward import BatchReward as BatchReward
    from relax_core.api.reward import GroupReward as GroupReward
    from relax_core.api.reward import Reward as Reward
    from relax_core.api.reward import Score as Score
    from relax_core.api.role import Context as Context
    from relax_core.api.role import Operation as Operation
    from relax_core.api.role import Reads as Reads
    from relax_core.api.role import Role as Role
    from relax_core.api.role import WeightService as WeightService
    from relax_core.api.routing import ROUTES as ROUTES
    from relax_core.api.routing import Routing as Routing
    from relax_core.api.scaling import Load as Load
    from relax_core.api.scaling import ScalingPolicy as ScalingPolicy
    from relax_core.api.secret import Secret as Secret
    from relax_core.api.sink import Sink as Sink
    from relax_core.api.source import BadRow as BadRow
    from relax_core.api.source import Filter as Filter
    from relax_core.api.source import Sampler as Sampler
    from relax_core.api.source import TaskSource as TaskSource
    from relax_core.api.status import Beat as Beat
    from relax_core.api.status import Board as Board
    from relax_core.api.status import Command as Command
    from relax_core.api.status import Wait as Wait
    from relax_core.api.task import Media as Media
    from relax_core.api.task import Message as Message
    from relax_core.api.task import Part as Part
    from relax_core.api.task import Task as Task
    from relax_core.api.task import ToolCall as ToolCall
    from relax_core.api.trainer import Chosen as Chosen
    from relax_core.api.trainer import Chunk as Chunk
    from relax_core.api.trainer import ChunkPlan as ChunkPlan
    from relax_core.api.trainer import OptimizerSpec as OptimizerSpec
    from relax_core.api.trainer import Trainer as Trainer
    from relax_core.api.trainer import TrainerSpec as TrainerSpec
    from relax_core.api.trainer import UpdateOutcome as UpdateOutcome
    from relax_core.api.trainer import UpdateResult as UpdateResult
    from relax_core.api.trajectory import Node as Node
    from relax_core.api.trajectory import Row as Row
    from relax_core.api.trajectory import Trajectory as Trajectory
    from relax_core.api.turn import Sleeper as Sleeper
    from relax_core.api.turn import Turns as Turns
    from relax_core.api.version import Version as Version
    from relax_core.api.weights import Manifest as Manifest
    from relax_core.api.weights import Receipt as Receipt
    from relax_core.api.weights import TensorInfo as TensorInfo
    from relax_core.api.weights import WeightTransport as WeightTransport
    from relax_core.api.weights import combined_fingerprint as combined_fingerprint
    from relax_core.api.weights import tensor_fingerprint as tensor_fingerprint
    from relax_core.api.worker import Worker as Worker
    from relax_core.api.worker import Workers as Workers
    from relax_core.api.worker import WorkerSpec as WorkerSpec
