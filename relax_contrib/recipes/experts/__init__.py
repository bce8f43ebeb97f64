# SPDX-License-Identifier: Apache-2.0
"""A tiny mixture of experts learns to sort digits, trained on the experts that the engine's tokens visited."""
