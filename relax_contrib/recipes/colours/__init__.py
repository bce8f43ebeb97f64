# SPDX-License-Identifier: Apache-2.0
"""The quickstart: a tiny model learns to sort digits. No account, no download, no GPU."""
