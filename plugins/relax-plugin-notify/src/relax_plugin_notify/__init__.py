# SPDX-License-Identifier: Apache-2.0
"""Messages to people, through Apprise, when a run starts, stalls, diverges, recovers or ends."""
