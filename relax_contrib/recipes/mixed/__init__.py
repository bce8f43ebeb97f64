# SPDX-License-Identifier: Apache-2.0
"""Mixed: a tiny Qwen3-Omni thinker learns to answer questions about pictures, videos and sounds, alone and together."""
