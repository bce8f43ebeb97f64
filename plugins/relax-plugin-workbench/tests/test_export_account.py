# SPDX-License-Identifier: Apache-2.0
"""`relax export --push-to` refuses a wrong name before the checkpoint is read."""

import pytest
from relax_plugin_workbench.export import export

from relax_core.api import ConfigError


@pytest.mark.parametrize("name", ["maths", "ada/maths/more", "ada/a b"])
def test_a_name_without_a_user_is_refused_before_the_run_is_read(tmp_path, name):
    with pytest.raises(ConfigError, match=r'--push-to: .*write "USER/NAME"'):
        export("absent", tmp_path / "out", push_to=name)


def test_public_without_a_model_to_send_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--public: .*add --push-to USER/NAME"):
        export("absent", tmp_path / "out", public=True)
