# SPDX-License-Identifier: Apache-2.0
"""Environments in which a separate program or function calls the policy over HTTP."""
