"""Contract tests of `{{ cookiecutter.name }}`{% if not cookiecutter.moved %}, and a test that runs the role on a bus with one claim{% endif %}."""

{% if not cookiecutter.moved -%}
import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

from relax_core.api import Claim, Ragged, RowBatch, RowId, StaleFence, Version
{% endif -%}
from relax_core.testing.role import RoleSuite

from {{ cookiecutter.package }}.{{ cookiecutter.module }} import {% if not cookiecutter.moved %}COLUMN, {% endif %}{{ cookiecutter.class_name }}


class TestConformance(RoleSuite):
    component = {{ cookiecutter.class_name }}
{%- if not cookiecutter.moved %}


class ScriptedBus:
    """A bus with rows of one group, which records what the role does; `fenced`: the row lease ends before the write."""

    def __init__(self, fenced=False):
        self.claims = [Claim(1, "", (RowId(0, 0, 0, 0), RowId(0, 1, 0, 0)), {}, (0,))]
        self.fenced, self.done = fenced, []

    async def claim(self, request, wait_s):
        return self.claims.pop() if self.claims else None

    async def read(self, claim, columns):
        return RowBatch(claim.rows, {"loss_mask": Ragged(np.array([0, 1, 1, 0, 1], np.uint8), np.array([3, 2]))})

    async def write(self, claim, columns):
        if self.fenced:
            raise StaleFence("the lease is over")
        self.done.append({name: column.values.tolist() for name, column in columns.items()})

    async def acknowledge(self, claim):
        self.done.append("acknowledged")

    async def version(self):
        return Version("actor", 0, 0 if self.claims else 1)


def done_by_the_role(bus):
    async def pause_point():
        return None

    config = SimpleNamespace(steps=1, rollout=SimpleNamespace(groups_per_step=4))
    context = SimpleNamespace(
        bus=bus, config=config, stopping=False, pause_point=pause_point, waiting=lambda *reason: nullcontext()
    )
    asyncio.run({{ cookiecutter.class_name }}().run(context))
    return bus.done


def test_the_column_has_the_number_of_trained_tokens_of_each_row():
    assert done_by_the_role(ScriptedBus()) == [{COLUMN: [2.0, 1.0]}, "acknowledged"]


def test_rows_whose_lease_is_over_are_left_to_the_next_claim():
    assert done_by_the_role(ScriptedBus(fenced=True)) == []
{%- endif %}
