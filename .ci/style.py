# SPDX-License-Identifier: Apache-2.0
"""Measure the size of the code, and refuse names and sentences that hide their meaning.

The script prints files, lines and functions by room, with two kinds of function that make code hard to follow: functions of at
most three lines, and private functions that their file uses once. It fails for a class name that exists twice in the core, a
refused word in a docstring, field description or error text, a missing licence line, module docstring or annotation, and for
a measure of `.ci/house.toml` above its limit. `tests/style/house.py` takes the measures that need a run. `.ci/lint` runs this
script; arguments name other folders.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPDX = "# SPDX-License-Identifier: Apache-2.0"
REFUSED = re.compile(
    r"\b(whoever|whomever|whatever|whatsoever|wherever|nobody|somebody|anybody|thereof|foretells?|owing|goes on|went on|"
    r"such a one|(is|are|was|were) told|told (of|by)|tells? (whether|what|who|of)|says? (who|what|whether)|the one (that|who)|"
    r"what (has|became|lies|stands|lives)|who (has|wants|asks|needs|waits|works)|is none|are none)\b"
    r"|^(What|Whose|Who|Of|To|It|They|Its|Their|Where|Which|Whether|How|That|Those|Once|Not)\b"
)
"""Words that hide the subject of a sentence, and first words that refer to something not named yet."""
PLUGIN = re.compile(r"relax[-_]plugin[-_][a-z]\w*")
"""Name of a plugin, which the core never contains: `.ci/plugins.py` writes the list that errors use."""
HOUSE = ROOT / ".ci" / "house.toml"
"""The measures with a limit: their present values and their targets."""
MEASURED = ("lines", "used_once", "opaque_returns")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One file as measured."""

    path: Path
    text: str
    tree: ast.Module
    nodes: Sequence[ast.AST]
    """All nodes of the tree: walking a tree takes longer than parsing the file."""
    functions: Sequence[Function]

    @classmethod
    def read(cls, path: Path) -> Module:
        text = path.read_text(encoding="utf-8")
        nodes = [*ast.walk(tree := ast.parse(text))]
        return cls(path, text, tree, nodes, [node for node in nodes if isinstance(node, Function)])

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT)) if self.path.is_relative_to(ROOT) else str(self.path)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def opaque_returns(self) -> int:
        """Count the functions whose result has the type `Any` in it, or a tuple of more than three items."""
        return sum(function.returns is not None and is_opaque(function.returns) for function in self.functions)

    @property
    def used_once(self) -> int:
        """Count the private functions that are named once more in their file, where they are used."""
        private = {function.name for function in self.functions if re.match(r"_[a-z]", function.name)}
        return sum(len(re.findall(rf"\b{name}\b", self.text)) == 2 for name in private)

    def faults(self) -> Iterator[str]:
        if not self.text.startswith(SPDX):
            yield f"{self.name}: the first line is not {SPDX!r}"
        if self.tree.body and not ast.get_docstring(self.tree):
            yield f"{self.name}: no module docstring"
        if self.name.startswith("relax_core/") and (plugin := PLUGIN.search(self.text)):
            yield f"{self.name} contains {plugin[0]!r}: the core names no plugin"
        for node in self.nodes:
            for line, text in sentences(node):
                if refused := REFUSED.search(text):
                    where = f"{self.name}:{line}: {text.splitlines()[0][:80]!r}"
                    yield f"{where} contains {refused[0]!r}: name the thing, and say what happens"
        for function in public(self.tree):
            if missing := unannotated(function):
                yield f"{self.name}:{function.lineno} {function.name}: no annotation of {', '.join(missing)}"


def sentences(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of a node's docstring, of the descriptions of its fields, and of the error that it raises."""
    if isinstance(node, Documented):
        if text := ast.get_docstring(node):
            yield getattr(node, "lineno", 1), text
        for field, below in pairwise(node.body):
            described = isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr)
            if described and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                yield below.lineno, below.value.value
    elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        for argument in node.exc.args:
            parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
            words = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts]
            yield node.lineno, "".join(words)


def is_opaque(annotation: ast.expr) -> bool:
    """Return True for an annotation that contains `Any`, or a tuple of more than three items of named types."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name) and node.id == "Any":
            return True
        is_tuple = isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tuple"
        if is_tuple and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) > 3:
            return True
    return False


def size(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def public(tree: ast.Module | ast.ClassDef) -> Iterator[Function]:
    """Yield public functions and methods, without functions nested in functions."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public(node)
        if isinstance(node, Function) and (not node.name.startswith("_") or node.name == "__init__"):
            yield node


def unannotated(function: Function) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += [one for one in (arguments.vararg, arguments.kwarg) if one]
    missing = [one.arg for one in named if one.annotation is None and one.arg not in ("self", "cls")]
    return missing + (["the result"] if function.returns is None else [])


def repeated_classes(modules: Sequence[Module]) -> Iterator[str]:
    """Yield the class names that two files of the core define."""
    places = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{module.name}:{node.lineno}")
    for name, where in places.items():
        if len(where) > 1:
            yield f"class {name} exists {len(where)} times: {', '.join(where)}"


def row(name: str, modules: Sequence[Module]) -> str:
    """Return one line of the table."""
    functions = [function for module in modules for function in module.functions]
    short = sum(size(function) - bool(ast.get_docstring(function)) <= 4 for function in functions)
    lines, once, opaque = (sum(getattr(module, name) for module in modules) for name in MEASURED)
    return f"{name:<42} {len(modules):>5} {lines:>7} {len(functions):>9} {short:>6} {once:>9} {opaque:>7}"


def measures(core: Sequence[Module], source: Iterable[Module]) -> dict[str, int]:
    """Return the measures of `.ci/house.toml` that need no run; `core` leaves `testing` out."""
    tests = [*(ROOT / "tests").rglob("*.py"), *ROOT.glob("plugins/*/tests/**/*.py")]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    allowed = [
        line for each in settings["tool"]["importlinter"]["contracts"] for line in each.get("ignore_imports", ())
    ]
    return {
        "core_files": len(core),
        "core_lines": sum(module.lines for module in core),
        "used_once": sum(module.used_once for module in core),
        "opaque_returns": sum(module.opaque_returns for module in core),
        "required_packages": len(settings["project"]["dependencies"]),
        "inside_imports": sum(line.startswith("relax_plugin_") for line in allowed),
        "source_lines": sum(module.lines for module in source),
        "test_lines": sum(len(file.read_text(encoding="utf-8").splitlines()) for file in tests),
    }


def above_limit(measured: Mapping[str, int], limits: Path = HOUSE) -> Iterator[str]:
    """Yield a fault for each measure above its limit, and print the measures that may have a lower limit."""
    house = tomllib.loads(limits.read_text(encoding="utf-8"))
    for name, value in measured.items():
        limit = house[name]
        if value > limit["most"]:
            yield f"{name}: {value}, above {limit['most']} in {limits.name}: {limit['what']}"
        elif value < limit["most"]:
            print(
                f"{name}: {value} of {limit['most']}; {limits.name} may have the lower value (target {limit['target']})"
            )


def packages() -> list[Path]:
    """Return the rooms of the core, the contributed recipes and each plugin's source; not tests and templates."""
    rooms = sorted(path for path in (ROOT / "relax_core").iterdir() if any(path.glob("*.py")))
    return [ROOT / "relax_core", *rooms, ROOT / "relax_contrib", *sorted((ROOT / "plugins").glob("*/src"))]


def modules_of(folder: Path) -> list[Module]:
    """Read all files below a folder; for `relax_core`, only the files directly in it."""
    found = folder.glob("*.py") if folder == ROOT / "relax_core" else folder.rglob("*.py")
    return [Module.read(path) for path in sorted(found)]


def main(folders: Sequence[Path]) -> int:
    measured = {folder: modules_of(folder) for folder in folders}
    print(f"{'':<42} {'files':>5} {'lines':>7} {'functions':>9} {'short':>6} {'used once':>9} {'opaque':>7}")
    for folder, modules in measured.items():
        if modules:
            print(row(str(folder.relative_to(ROOT)) if folder.is_relative_to(ROOT) else str(folder), modules))
    core = [
        each for folder, modules in measured.items() if folder.is_relative_to(ROOT / "relax_core") for each in modules
    ]
    everything = [module for modules in measured.values() for module in modules]
    faults = [fault for module in everything for fault in module.faults()]
    if core:
        untested = [each for each in core if "testing" not in each.path.parts]
        print(row("the core without testing", untested))
        if set(folders) == set(packages()):
            source = [each for each in everything if each in untested or not each.name.startswith("relax_core/")]
            faults += above_limit(measures(untested, source))
    faults += repeated_classes(core or everything)
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main([Path(folder).resolve() for folder in sys.argv[1:]] or packages()))
