# SPDX-License-Identifier: Apache-2.0
"""The names that this package exports, and the module of each; they load on first use."""

# fmt: off
# isort: skip_file
from .algorithm import (
    Advantages as Advantages, Algorithm as Algorithm, ENTROPY as ENTROPY, Groups as Groups, LOG_PROBS as LOG_PROBS,
    Loss as Loss, LossBatch as LossBatch, Output as Output, PolicyOutputs as PolicyOutputs, Scope as Scope,
    Source as Source, Term as Term, VALUES_OUTPUT as VALUES_OUTPUT, log_probs_at as log_probs_at, top_k as top_k,
)
from .batch import (
    ADVANTAGES as ADVANTAGES, ALGORITHM_INDEX as ALGORITHM_INDEX, AttemptId as AttemptId,
    CONTEXTS as CONTEXTS, Column as Column,
    LOSS_MASK as LOSS_MASK, MARGINS as MARGINS, OLD_LOG_PROBS as OLD_LOG_PROBS, OUTCOME as OUTCOME,
    REF_LOG_PROBS as REF_LOG_PROBS, RETURNS as RETURNS, REWARDS as REWARDS, ROLLOUT_LOG_PROBS as ROLLOUT_LOG_PROBS,
    ROUTED_VALID as ROUTED_VALID, Ragged as Ragged, RowBatch as RowBatch, RowId as RowId, STATES as STATES,
    STEP_REWARDS as STEP_REWARDS, TEACHER_INDEX as TEACHER_INDEX, TEACHER_LOG_PROBS as TEACHER_LOG_PROBS,
    TOKENS as TOKENS, TURNS as TURNS, VALUES as VALUES, WEIGHT_VERSIONS as WEIGHT_VERSIONS,
    routed_experts as routed_experts, student_top_k_ids as student_top_k_ids,
    teacher_log_probs_at as teacher_log_probs_at, teacher_top_k as teacher_top_k,
)
from .bus import (
    Account as Account, Bus as Bus, BusComponent as BusComponent, BusSettings as BusSettings,
    BusStatistics as BusStatistics, Claim as Claim,
    ClaimRequest as ClaimRequest, Issue as Issue, PayloadStore as PayloadStore, Sealed as Sealed,
)
from .checks import CheckFinding as CheckFinding, FirstStepFacts as FirstStepFacts, PreflightFacts as PreflightFacts
from .component import (
    Check as Check, Chosen as Chosen, Component as Component, Configurable as Configurable, KINDS as KINDS, Kind as Kind,
    Table as Table,
)
from .engine import (
    Capabilities as Capabilities, Delta as Delta, Engine as Engine, EngineSpec as EngineSpec,
    GenerateRequest as GenerateRequest, Generated as Generated, Health as Health,
    ModelClient as ModelClient,
)
from .environment import (
    Action as Action, Environment as Environment, Observation as Observation, PromptRefused as PromptRefused,
    RowTool as RowTool, Session as Session, Step as Step, Tool as Tool, tools_digest as tools_digest,
)
from .errors import (
    ConfigError as ConfigError, DeadlineExceeded as DeadlineExceeded, DiskFull as DiskFull, Diverged as Diverged,
    InfrastructureError as InfrastructureError, LastingFailure as LastingFailure,
    PluginError as PluginError, RelaxError as RelaxError, RetryLater as RetryLater, StaleFence as StaleFence,
    WorkerDied as WorkerDied, disk_error as disk_error,
)
from .events import (
    CheckpointSaved as CheckpointSaved, EvalFinished as EvalFinished, Event as Event, ExportSaved as ExportSaved,
    GuardFired as GuardFired, Logged as Logged, RolesReported as RolesReported, RunClosed as RunClosed,
    RunOpened as RunOpened, WorkAtEnd as WorkAtEnd,
    RoleFailed as RoleFailed, RoleRecovered as RoleRecovered, RolledBack as RolledBack,
    RolloutMeasured as RolloutMeasured, RunFinished as RunFinished, RunStarted as RunStarted,
    SamplesScored as SamplesScored, Sink as Sink, Span as Span, StepFinished as StepFinished,
    WeightsPublished as WeightsPublished, sample_row as sample_row, sample_turns as sample_turns,
)
from .family import ModelFamily as ModelFamily, ROUTED_COLUMNS as ROUTED_COLUMNS, Rendered as Rendered, Routing as Routing
from .hooks import hook as hook
from .media import MediaPipeline as MediaPipeline
from .modality import (
    ModalityProcessor as ModalityProcessor, PlaceholderSpan as PlaceholderSpan, ProcessedMedia as ProcessedMedia,
)
from .files import load_function as load_function
from .options import Options as Options, Secret as Secret, TableOptions as TableOptions
from .plan import (
    Estimate as Estimate, Layout as Layout, Operation as Operation, Plan as Plan, Reads as Reads, WorkerGroup as WorkerGroup,
    Workload as Workload,
)
from .reward import (
    BatchReward as BatchReward, Gold as Gold, GroupReward as GroupReward, Reward as Reward, Score as Score,
    Unreadable as Unreadable,
)
from .role import (
    Clock as Clock, Context as Context, DeviceLease as DeviceLease, DeviceLeases as DeviceLeases,
    Heartbeat as Heartbeat, Offloadable as Offloadable, Role as Role, RunStatus as RunStatus,
    SystemClock as SystemClock, Wait as Wait, WeightService as WeightService, Worker as Worker,
    WorkerSpec as WorkerSpec, Workers as Workers,
)
from .run_commands import (
    Autoscale as Autoscale, ClearMetrics as ClearMetrics, Command as Command, Continue as Continue, Evaluate as Evaluate,
    LogError as LogError, LogMetrics as LogMetrics, Pause as Pause, Profile as Profile,
    SaveCheckpoint as SaveCheckpoint, ScaleRequest as ScaleRequest, Stop as Stop,
    named_command as named_command,
)
from .sandbox import (
    Box as Box, OpenBox as OpenBox, ProgramEnd as ProgramEnd, ProgramResult as ProgramResult, Sandbox as Sandbox,
    SandboxClient as SandboxClient, SandboxLimits as SandboxLimits,
)
from .scaling import Autoscaler as Autoscaler, Proposal as Proposal, ScalingPolicy as ScalingPolicy, Signals as Signals
from .scaling_limits import ScalingLimits as ScalingLimits
from .source import BadRow as BadRow, Filter as Filter, Sampler as Sampler, TaskSource as TaskSource
from .task import Media as Media, Message as Message, Part as Part, Task as Task, ToolCall as ToolCall
from .trainer import (
    Chunk as Chunk, ChunkPlan as ChunkPlan, OptimizerSpec as OptimizerSpec, Trainer as Trainer,
    TrainerSpec as TrainerSpec, TrainerWork as TrainerWork, UpdateOutcome as UpdateOutcome, UpdateResult as UpdateResult,
)
from .trajectory import (
    DropReason as DropReason, Node as Node, Outcome as Outcome, Row as Row, Trajectory as Trajectory,
    context_key as context_key,
)
from .weights import (
    Canary as Canary, Manifest as Manifest, Receipt as Receipt, TensorInfo as TensorInfo, Version as Version,
    WeightTransport as WeightTransport, combined_fingerprint as combined_fingerprint,
    tensor_fingerprint as tensor_fingerprint,
)
