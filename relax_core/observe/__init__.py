# SPDX-License-Identifier: Apache-2.0
"""Observing a run: its directory, log, metrics, sinks, observers, notifications and trace. Writes; `views` reads."""
