# SPDX-License-Identifier: Apache-2.0
"""Recording of a run: its directory, log, metrics, sinks, observers and trace. `views` reads them."""
