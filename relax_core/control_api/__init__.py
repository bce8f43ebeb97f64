# SPDX-License-Identifier: Apache-2.0
"""The control API of a run: an HTTP server over its run directory, and the client of the command line."""
