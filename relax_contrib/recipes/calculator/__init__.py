# SPDX-License-Identifier: Apache-2.0
"""Calculator: a tiny model learns to ask a calculator over MCP, and to answer with what it says."""
