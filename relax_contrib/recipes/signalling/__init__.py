# SPDX-License-Identifier: Apache-2.0
"""Signalling: one tiny model in two roles, speaker and listener, learns a common meaning of signals."""
