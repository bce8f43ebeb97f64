# SPDX-License-Identifier: Apache-2.0
"""The names of the room, and the module of each."""

from .config.run_config import to_toml as to_toml
from .control_api.client import (
    UNIX as UNIX,
    Answered as Answered,
    ControlClient as ControlClient,
    read_token as read_token,
)
from .control_api.operations import (
    ACTIONS as ACTIONS,
    Book as Book,
    ControlOperation as ControlOperation,
    Facts as Facts,
    PlainAction as PlainAction,
    Refused as Refused,
    expected as expected,
)
from .control_api.run_control import RunControl as RunControl
from .engines.scaling import PoolScaling as PoolScaling
from .observe.epoch import WriterLock as WriterLock
from .observe.event_log import EVENTS as EVENTS, recorded_event as recorded_event
from .observe.files import (
    check_new_folder as check_new_folder,
    disk_errors as disk_errors,
    encode as encode,
    read_document as read_document,
    write_bytes as write_bytes,
    write_document as write_document,
    write_text as write_text,
)
from .observe.first_step import ROUND_TRIP as ROUND_TRIP, fault_lines as fault_lines, passed_line as passed_line
from .observe.metrics import mean as mean, metric as metric
from .observe.records import frame as frame, read_frames as read_frames
from .observe.redaction import Redactor as Redactor, credentials as credentials
from .observe.run_directory import find_run as find_run, runs_root as runs_root
from .views.answers import ANSWERS as ANSWERS, scale_plan as scale_plan, scaling_of as scaling_of
from .views.follower import LineFollower as LineFollower
from .views.logs import (
    LOOK_S as LOOK_S,
    REMARKS as REMARKS,
    LogFilter as LogFilter,
    RunLogs as RunLogs,
    chosen as chosen,
    log_filter as log_filter,
    looks as looks,
    remarks as remarks,
)
from .views.media_figures import MEDIA_CSS as MEDIA_CSS, medium_figure as medium_figure
from .views.run import (
    Metrics as Metrics,
    RunHealth as RunHealth,
    RunView as RunView,
    health as health,
    open_run as open_run,
    readable as readable,
)
from .views.why import (
    first_step_faults as first_step_faults,
    log_prob_difference as log_prob_difference,
    mismatch_warning as mismatch_warning,
    seconds as seconds,
    slow_rank_warning as slow_rank_warning,
)
