# SPDX-License-Identifier: Apache-2.0
"""Views of a live or ended run: `open_run`, status, why, display and report. They write only reports and requests."""
