# SPDX-License-Identifier: Apache-2.0
"""A baked project's own tests fail once its code breaks a promise: wrong type, blocking, by chance, and others.

`tests/authors/test_mutants.py` shows it of the template of algorithms.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from relax_plugin_authoring.new_project import bake

pytestmark = [pytest.mark.process, pytest.mark.one_process("suites of suites")]
MUTANTS: dict[str, dict[str, tuple[str, str]]] = {
    "reward": {
        "wrong type": ("return float(", "return str("),
        "blocking": ("lines = ", "__import__('time').sleep(3600)\n        lines = "),
        "by chance": ("return float(", "return __import__('random').random() + float("),
    },
    "environment": {
        "wrong type": ('return Step("Wrong, try again.", done=False)', 'return "Wrong"'),
        "blocking": ("self.tries += 1", "__import__('time').sleep(3600)"),
        "by chance": ("reward=1.0 / self.tries", "reward=__import__('random').random()"),
    },
    "task-source": {
        "a task lost": ("return len(self._rows)", "return len(self._rows) - 1"),
        "ids change": ("{self._path.stem}:{index}", "{id(self)}:{index}"),
        "a column lost": ("answer, columns)", "answer)"),
        "missing file": ("except (OSError, ValueError)", "except ValueError"),
    },
    "sampler": {
        "wrong type": ("return random.randrange(num_tasks)", "return num_tasks"),
        "by chance": ("Random(f", "Random() or Random(f"),
        "state lost": ('return {"unsolved": sorted(self._unsolved)}', "return {}"),
    },
    "filter": {
        "wrong type": ('else ""', "else None"),
        "by chance": ('return "too easy"', "return str(id(object()))"),
    },
    "sink": {
        "a step twice": ("if trained and not self._continued", "if False"),
        "evaluation dropped": ("trained = any(", "trained = not any("),
        "argument changed": ('{"step": step, **values}', 'values.setdefault("step", step) and values'),
    },
    "scaling-policy": {
        "wrong type": ("Proposal(size + 1", "Proposal(0"),
        "without data": ("return self.start(), None", 'return 0, Proposal(2, "more")'),
        "memory": (
            "        size, waits",
            "        state = self.seen = getattr(self, 'seen', 0) + 1\n        size, waits",
        ),
        "restless": ("return state, None", "return state, Proposal(5 if size < 5 else 1, 'more')"),
    },
    "bus": {
        "dtype lost": ("column.values for name", "column.values.astype(float) for name"),
    },
    "weight-transport": {
        "wrong dtype taken": ("held != wanted or", ""),
        "unchanged unnamed": ("unchanged_names(self._sent.get(version.model), infos)", "()"),
    },
    "model-family": {
        "whole chat again": ("*self._turns(appended), *self._opening()))", "*self._turns((*before, *appended))))"),
        "no end of turn": ("return (self._end,)", "return ()"),
    },
    "modality-processor": {
        "another budget": ("sound.getnframes(), sound.getframerate())\n\n", "1, sound.getframerate())\n\n"),
        "damaged bytes": ("except (wave.Error, EOFError)", "except EOFError"),
    },
    "role": {
        "of another role": ('Operation(f"{name}.count", cls.name', 'Operation("actor.count", "actor"'),
    },
}
SAID = {
    "wrong type": ("return a number", "return a Step", "return an index", "return a string", "want an int"),
    "blocking": ("blocks for ever",),
    "by chance": ("gave another result",),
    "a task lost": ("assert 4 == 5",),
    "ids change": ("gave another result",),
    "a column lost": ("[None, None",),
    "missing file": ("nowhere",),
    "state lost": ("the state is incomplete",),
    "a step twice": ("has step 3 twice",),
    "evaluation dropped": ("has step 3 twice", "[1, 2, 3"),
    "argument changed": ("changed its argument",),
    "without data": ("without any signal",),
    "memory": ("has a memory besides the state", "gave another result"),
    "restless": ("engines",),
    "dtype lost": ("uint16",),
    "wrong dtype taken": ("DID NOT RAISE",),
    "unchanged unnamed": ("set()",),
    "whole chat again": ("And 3 + 3?",),
    "no end of turn": ("assert (())",),
    "another budget": ("assert 3 == 1",),
    "damaged bytes": ("file does not start with RIFF id",),
    "of another role": ("it must name its own",),
}
"""By fault, texts of which a failed test has to say one."""


def suite_files() -> dict[str, str]:
    files: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        for kind, faults in MUTANTS.items():
            for fault, (old, new) in faults.items():
                name = f"{kind} {fault}".replace(" ", "-")
                project = bake(kind, name, Path(folder))
                (package,) = (project / "src").iterdir()
                module = kind.replace("-", "_")
                (code,) = package.glob(f"{module}.py")
                assert code.read_text().count(old)
                # The suite alone: the template's other tests call the component in pytest's own process, which a mutant blocks.
                tests = (project / "tests" / f"test_{module}.py").read_text().partition("\n\n\ndef test_")[0] + "\n"
                if fault == "blocking":
                    tests = tests.replace("    component = ", "    deadline_s = 0.5\n    component = ")
                files[f"{package.name}/{module}.py"] = code.read_text().replace(old, new)
                files[f"{path(kind, fault)}.py"] = tests
    return files


def path(kind: str, fault: str) -> str:
    return f"test_template_{kind}_{fault}".replace(" ", "_").replace("-", "_")


@pytest.mark.parametrize(("kind", "fault"), [(kind, fault) for kind, faults in MUTANTS.items() for fault in faults])
def test_a_mutant_of_the_template_fails_its_own_tests(failures, kind, fault):
    failed = failures(path(kind, fault))
    assert any(said in told for said in SAID[fault] for told in failed.values()), failed
