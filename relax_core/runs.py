# SPDX-License-Identifier: Apache-2.0
"""The public room for questions about runs and their files, and for changes of a live run.

A run is read through its directory with `open_run`, here or by a notebook, and changed by requests: `RunControl` sends
them through the run directory, `ControlClient` through the control API of a run elsewhere. `runs.pyi` lists the names
and their modules, which load on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("relax_core", __file__)
