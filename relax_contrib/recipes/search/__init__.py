# SPDX-License-Identifier: Apache-2.0
"""Search: a tiny model learns to find people in a corpus with the right query, and to answer from the result."""
