# SPDX-License-Identifier: Apache-2.0
"""The registry of published weights; imports no torch."""
