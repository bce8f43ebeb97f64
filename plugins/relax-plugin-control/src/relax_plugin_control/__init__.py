# SPDX-License-Identifier: Apache-2.0
"""The control API of a run over HTTP, and the commands that serve it, scale a run and serve an engine to a run."""
