# SPDX-License-Identifier: Apache-2.0
"""SmolLM2: the pretrained SmolLM2-135M-Instruct learns to answer sums of two numbers up to 19."""
