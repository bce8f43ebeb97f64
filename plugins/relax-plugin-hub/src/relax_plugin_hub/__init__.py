# SPDX-License-Identifier: Apache-2.0
"""Upload of models to the Hugging Face Hub: the exports of a run while it trains, and any exported folder."""
