# SPDX-License-Identifier: Apache-2.0
"""Reading a run, live or ended: `open_run`, status, why, the display, the report. Never writes what a run depends on."""
