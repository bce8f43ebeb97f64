"""Contract tests of `{{ cookiecutter.name }}`: leases, fences, credits, the ledger's account{% if not cookiecutter.moved %}, and no files left{% endif %}."""

{% if not cookiecutter.moved -%}
import asyncio

import numpy as np

from relax_core.api import Ragged
{% endif -%}
from relax_core.testing.bus import BusSuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {{ cookiecutter.class_name }}


class TestConformance(BusSuite):
    component = {{ cookiecutter.class_name }}
{%- if not cookiecutter.moved %}


def test_freed_blocks_leave_no_files_and_a_closed_store_leaves_no_folder(tmp_path):
    async def scene():
        store = await {{ cookiecutter.class_name }}({{ cookiecutter.class_name }}.options_model()(directory=str(tmp_path))).open_store()
        column = Ragged(np.arange(3, dtype=np.int32), np.array([1, 2]))
        for key in (1, 2):
            await store.put(key, {"tokens": column})
        await store.free([1, 7])
        assert [path.name for path in tmp_path.glob("*/*")] == ["2.npz"]
        await store.close()
        assert list(tmp_path.iterdir()) == []

    asyncio.run(scene())
{%- endif %}
