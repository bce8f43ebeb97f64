# SPDX-License-Identifier: Apache-2.0
"""Search: a tiny model learns to look people up, by the right query, and to answer with what it found."""
