# SPDX-License-Identifier: Apache-2.0
"""Tests with Trackio run where it is installed (`tox -e sinks`); here only what needs no Trackio."""

import os
import tempfile
from importlib.util import find_spec

collect_ignore = []
if find_spec("trackio"):
    folder = tempfile.TemporaryDirectory(prefix="relax-trackio-")
    os.environ["TRACKIO_DIR"] = folder.name  # read when trackio is imported, also by processes of a suite
else:
    collect_ignore += ["test_trackio.py"]
