# SPDX-License-Identifier: Apache-2.0
"""Search as a tool: `environment = "search"`."""
