# SPDX-License-Identifier: Apache-2.0
"""The tests of this plugin share one module that makes media."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
