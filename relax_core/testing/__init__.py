# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: one test suite per kind of component. Needs the extra `relax-core[testing]`.

Only tests and `relax plugins check` import this package; the core itself does not.
"""

import pkgutil

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
