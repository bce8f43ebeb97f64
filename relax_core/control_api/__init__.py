# SPDX-License-Identifier: Apache-2.0
"""Changes of a live run: their state machine, the requests through the run directory, and the client of a control API."""
