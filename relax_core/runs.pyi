# SPDX-License-Identifier: Apache-2.0
"""The names of the room, and the module of each."""

from .control_api.client import (
    UNIX as UNIX,
    Answered as Answered,
    ControlClient as ControlClient,
    read_token as read_token,
)
from .control_api.operations import (
    ACTIONS as ACTIONS,
    Action as Action,
    Book as Book,
    ControlOperation as ControlOperation,
    Facts as Facts,
    PlainAction as PlainAction,
    Refused as Refused,
    expected as expected,
)
from .control_api.run_control import RunControl as RunControl
from .engines.scaling import PoolScaling as PoolScaling, ScaleRequest as ScaleRequest
from .observe.epoch import WriterLock as WriterLock
from .observe.event_log import EVENTS as EVENTS
from .observe.files import encode as encode, read_document as read_document, write_document as write_document
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
from .views.run import (
    Metrics as Metrics,
    RunHealth as RunHealth,
    RunView as RunView,
    health as health,
    open_run as open_run,
)
