# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 and reasoning-gym: the pretrained SmolLM2-135M-Instruct learns sums, products and counting letters at once."""
