# SPDX-License-Identifier: Apache-2.0
"""Calculator: a tiny model learns to call a calculator over MCP and to answer with its result."""
