# SPDX-License-Identifier: Apache-2.0
"""Each task has exactly one teacher, and its rows say which."""

import numpy as np

from relax_core.api import Ragged, RowBatch, RowId, Task
from relax_core.config.tables import TeacherTable
from relax_core.data.tasks import teachers_of, teaching_fault
from relax_core.sampling.rows import with_teacher

MATHS, CODE = TeacherTable(path="a", only="domain=maths"), TeacherTable(path="b", only="kind.language=python")


def task(**columns):
    return Task("t", "p", metadata=columns)


def test_a_task_is_taught_by_those_whose_filter_it_meets():
    assert teachers_of(task(domain="maths"), [MATHS, CODE]) == [0]
    assert teachers_of(task(kind={"language": "python"}), [MATHS, CODE]) == [1]
    assert teachers_of(task(), [TeacherTable(path="a")]) == [0]
    assert teachers_of(task(domain="maths-2"), [MATHS, CODE]) == [], "the value is the whole one"


def test_a_task_without_a_teacher_or_with_two_is_at_fault():
    assert teaching_fault([MATHS, CODE], task(domain="maths")) is None
    assert teaching_fault([MATHS, CODE], task(kind={"language": "python"})) is None
    assert teaching_fault([MATHS, CODE], task(domain="law"))[:2] == ("teachers", "no teacher teaches")
    both = teaching_fault([MATHS, CODE], task(domain="maths", kind={"language": "python"}))
    assert both[1] == "teachers.0 (domain=maths) and teachers.1 (kind.language=python) teach"


def test_rows_carry_the_number_of_their_teacher():
    ids = tuple(RowId(*place) for place in ((3, 0, 0, 0), (3, 1, 0, 0), (5, 0, 0, 0), (5, 0, 0, 1)))
    rows = RowBatch(ids, {"tokens": Ragged.of([np.zeros(2, np.int32)] * 4)})
    made = with_teacher(rows, {3: task(kind={"language": "python"}), 5: task(domain="maths")}, [MATHS, CODE])
    column = made.columns["teacher_index"]
    assert column.values.tolist() == [1, 1, 0, 0] and column.lengths.tolist() == [1, 1, 1, 1]
    assert column.values.dtype == np.int32
