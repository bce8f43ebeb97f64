# SPDX-License-Identifier: Apache-2.0
"""Derive from annotations which classes carry a sample or a published version through the code.

A walk begins with the classes in the signatures of the contracts that it passes. Further classes are added until none is
left: a class that holds such a class, a subclass, a class with all members of such a Protocol, and a data class that a
function makes of such a class. Enums, and data classes of nothing but names and numbers (ids, versions), carry nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

CONTRACTS = {
    "sample": (
        "TaskSource.__getitem__", "ModelFamily.delta", "Environment.reset", "Environment.step", "Engine.generate",
        "Reward.score", "Bus.admit", "Bus.put", "Bus.claim", "Bus.read", "Algorithm.advantages", "Algorithm.loss",
        "Trainer.plan", "Trainer.accumulate", "Trainer.forward", "Trainer.finish_update",
    ),
    "publish": ("WeightTransport.receive",),
}  # fmt: skip
"""The methods of `relax_core.api` that each walk passes, in order."""
NUMBERS = frozenset({"str", "int", "float", "bool", "None", "Literal"})
PLAIN = NUMBERS | {
    "bytes",
    "tuple",
    "list",
    "dict",
    "set",
    "frozenset",
    "Sequence",
    "Mapping",
    "Iterable",
    "Collection",
}
PLAIN |= {"Any", "np", "ndarray", "torch", "Tensor", "dtype"}
"""Names in the annotations of a class that is made of data only."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Signature:
    """The names in a function's annotations; a method also takes its class."""

    owner: str
    name: str
    takes: frozenset[str]
    gives: frozenset[str]


@dataclass(frozen=True)
class Shape:
    """One class as its source declares it."""

    bases: frozenset[str]
    holds: frozenset[str]
    """Names in the annotations of fields, of a container's items, or of the constructor's parameters."""
    members: frozenset[str]
    data: bool
    """True: a dataclass or a named tuple."""


class Source:
    """The classes, functions and type aliases that some files define."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.classes: dict[str, Shape] = {}
        self.functions: list[Signature] = []
        self.aliases: dict[str, set[str]] = {}
        trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
        homes = {
            node.name: ".".join(dropwhile(lambda part: not part.startswith("relax_"), file.with_suffix("").parts))
            for file, tree in trees.items()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        }
        for tree in trees.values():
            self._foreign = foreign(tree, homes)
            self._read(tree, "")
        enums = {name for name, shape in self.classes.items() if shape.bases & {"StrEnum", "IntEnum", "Enum"}}
        self.plain = enums | {name for name, shape in self.classes.items() if shape.data and shape.holds <= NUMBERS}
        """Classes that carry nothing: enums, and data classes of nothing but names and numbers."""

    def _read(self, tree: ast.Module | ast.ClassDef, owner: str) -> None:
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self._read(node, node.name)
                self.classes[node.name] = self._shape(node)
            elif isinstance(node, Function):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                takes = self._names(*(argument.annotation for argument in arguments)) | ({owner} if owner else set())
                gives = self._names(node.returns)
                self.functions.append(Signature(owner, node.name, frozenset(takes), frozenset(gives)))
            elif isinstance(node, ast.Assign | ast.AnnAssign) and not owner:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                self.aliases[ast.unparse(target)] = names(node.value)

    def _names(self, *annotations: ast.expr | None) -> set[str]:
        """Return the names in annotations of the file that is read; the names in `_foreign` begin with a question mark."""
        return {f"?{name}" if name in self._foreign else name for name in names(*annotations)}

    def _shape(self, node: ast.ClassDef) -> Shape:
        bases = self._names(*(base.value if isinstance(base, ast.Subscript) else base for base in node.bases))
        data = "NamedTuple" in bases or "dataclass" in names(*node.decorator_list)
        if data:
            holds = self._names(*(field.annotation for field in node.body if isinstance(field, ast.AnnAssign)))
        elif bases & {"dict", "list", "tuple"}:
            holds = self._names(*node.bases)
        else:
            made = (each.takes for each in self.functions if (each.owner, each.name) == (node.name, "__init__"))
            holds = set().union(*made) - {node.name}
        members = {each.name for each in node.body if isinstance(each, Function) and not each.name.startswith("_")}
        return Shape(frozenset(bases), frozenset(holds), frozenset(members), data)


def foreign(tree: ast.Module, homes: Mapping[str, str]) -> set[str]:
    """Return the names of classes that a module uses for something else: its own alias, or an import from elsewhere.

    `homes`: the module of each class. `Action` is a class of the API, and also an alias for the actions of the router.
    """
    found = {ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)} & homes.keys()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {each.name for each in node.names if not homes.get(each.name, "").startswith(node.module or "")}
    return found & homes.keys()


def names(*annotations: ast.expr | None) -> set[str]:
    """Return the names in annotations, also in those that are written as text."""
    found: set[str] = set()
    for node in (each for annotation in annotations if annotation is not None for each in ast.walk(annotation)):
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            with suppress(SyntaxError, ValueError):  # other texts
                found |= names(ast.parse(node.value, mode="eval").body)
    return found


def contract_forms(contracts: Sequence[str], api: Source) -> frozenset[str]:
    """Return the names of the classes in the signatures of these contracts (`Class.method`).

    Raises LookupError for a contract that `api` does not define.
    """
    signatures = {f"{each.owner}.{each.name}": each for each in api.functions}
    if missing := sorted(set(contracts) - signatures.keys()):
        raise LookupError(f"relax_core.api has no {', '.join(missing)}; correct CONTRACTS in tests/style/forms.py")
    passed = set().union(*(signatures[name].takes | signatures[name].gives for name in contracts))
    passed |= set().union(*(api.aliases.get(name, set()) for name in passed))
    owners = {signatures[name].owner for name in contracts}
    return frozenset((passed & api.classes.keys()) - owners - api.plain)


def spread(found: Set[str], api: Source, source: Source) -> frozenset[str]:
    """Return these classes and all classes of the source that carry them, take their place or are made of them."""
    data = {name for name, shape in source.classes.items() if shape.data}
    protocols = [api.classes[name] for name in found if name in api.classes and "Protocol" in api.classes[name].bases]

    def carries(shape: Shape, found: Set[str]) -> bool:
        made_of_data = shape.data or shape.holds <= PLAIN | found | data | source.plain
        if (made_of_data and shape.holds & found) or shape.bases & found:
            return True
        return any(protocol.members <= shape.members for protocol in protocols)

    while True:
        more = {name for name, shape in source.classes.items() if carries(shape, found)}
        more |= {name for each in source.functions if each.takes & found for name in each.gives & data - source.plain}
        if more <= found:
            return frozenset(found)
        found = found | more
