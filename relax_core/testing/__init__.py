# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: one module a kind, as the table of kinds names it. Needs the extra `relax-core[testing]`.

Only tests and `relax plugins check` load it; nothing of the core imports it.
"""

import pkgutil

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
