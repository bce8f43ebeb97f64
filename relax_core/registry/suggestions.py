# SPDX-License-Identifier: Apache-2.0
"""Hints for a name that no loaded plugin offers: it is broken, switched off, of another kind, not installed, or mistyped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from relax_core.api.component import KINDS, Kind
from relax_core.api.errors import ConfigError, PluginError, RelaxError
from relax_core.registry.handshake import PluginState, Record, canonical, find_module


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Find at most three known names that are close to this one, nearest first."""
    from difflib import get_close_matches

    return get_close_matches(name, list(known), n=3, cutoff=0.6)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Say `did you mean 'x'?` where something is near, else all there is."""
    names = sorted(known)
    if close := nearest(name, names):
        return f"did you mean {' or '.join(repr(n) for n in close)}?"
    return f"known are {', '.join(names)}" if names else "there is none"


_POLICY_GRADIENT = (
    "cispo", "dapo", "dppo", "dr-grpo", "gdpo", "gigpo", "gpg", "grpo", "gspo", "m2po", "max-rl", "opo", "ppo", "reinforce",
    "reinforce-plus-plus", "reinforce-plus-plus-baseline", "remax", "rloo", "sapo",
)  # fmt: skip

KNOWN: dict[str, dict[str, str]] = {
    "algorithm": {
        **dict.fromkeys(_POLICY_GRADIENT, "relax-plugin-policy-gradient"),
        "distillation": "relax-plugin-distillation",
        **dict.fromkeys(("dpo", "reward-model", "sft"), "relax-plugin-supervised"),
    },
    "filter": dict.fromkeys(("zero-variance", "reward-band", "truncated"), "relax-plugin-selection"),
    "sampler": dict.fromkeys(("curriculum", "mixture", "success-rate"), "relax-plugin-selection"),
    "reward": dict.fromkeys(("exact", "judge", "maths"), "relax-plugin-rewards"),
    "modality-processor": dict.fromkeys(("image", "video", "audio"), "relax-plugin-omni"),
    "engine": {
        "transformers": "relax-plugin-transformers",
        "vllm": "relax-plugin-vllm",
        "sglang": "relax-plugin-sglang",
    },
    "trainer": {"torch": "relax-plugin-torch", "megatron": "relax-plugin-megatron"},
    "sink": {"tensorboard": "relax-plugin-tensorboard"},
    "weight-transport": dict.fromkeys(("http", "collective"), "relax-plugin-network-weights"),
    "bus": {"transferqueue": "relax-plugin-transferqueue"},
}
"""Components of the project's own plugins, so that an unknown name can say what to install. Not a registry."""


def missing(kind: Kind, name: str, records: Sequence[Record]) -> RelaxError:
    """Make the error for an unknown name, most certain cause first."""
    wanted, _, bare = name.rpartition(":")
    field = kind.table or kind.name
    if record := _would_offer(kind, wanted, bare, records):
        return _unloaded(kind, bare, record)
    if fix := _elsewhere(kind, wanted, bare, records) or _installable(kind, wanted, bare, records):
        return ConfigError(field, repr(name), fix)
    known = [component.name for record in records for of, component in record.components if of == kind.name]
    return ConfigError(field, repr(name), f"no plugin offers it; {did_you_mean(bare, known)}{_failures(records)}")


def _would_offer(kind: Kind, wanted: str, name: str, records: Sequence[Record]) -> Record | None:
    home = KNOWN.get(kind.name, {}).get(name, "")
    for record in (record for record in records if record.state is not PluginState.OK):
        named = wanted in (record.distribution, record.name) if wanted else canonical(record.distribution) == home
        if named or (not wanted and _claims(record, kind.hook, name)):
            return record
    return None


def _claims(record: Record, hook: str, name: str) -> bool:
    """Guess from a plugin's source, without running it, whether this hook offers a component of this name.

    A plugin that builds its components in a loop can't be read so.
    """
    spec = find_module(record.module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return False
    try:
        source = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    for function in (node for node in ast.walk(source) if isinstance(node, ast.FunctionDef) and node.name == hook):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            named = (*call.args[:1], *(k.value for k in call.keywords if k.arg == "name"))
            if any(isinstance(value, ast.Constant) and value.value == name for value in named):
                return True
    return False


def _unloaded(kind: Kind, name: str, record: Record) -> RelaxError:
    if record.state is PluginState.SKIPPED:
        return ConfigError(
            kind.table or kind.name, repr(name), f"{record.title} has it and was skipped: {record.reason}"
        )
    return PluginError(f"{kind.name} {name!r}", f"{record.title} has it and is broken: {record.reason}", record.frames)


def _elsewhere(kind: Kind, wanted: str, name: str, records: Sequence[Record]) -> str:
    """The same name of another distribution, or of another kind."""
    for record in records:
        for of, component in record.components:
            if component.name == name and of == kind.name and wanted:
                return f"{record.title} has it; write {record.distribution}:{name}"
    for record in records:
        for of, component in record.components:
            if component.name == name and not wanted:
                return f"{record.title} has it as {of}; it belongs in [{KINDS[of].table or of}]"
    return ""


def _installable(kind: Kind, wanted: str, name: str, records: Sequence[Record]) -> str:
    home = KNOWN.get(kind.name, {}).get(name, "")
    if not home or wanted not in ("", home):
        return ""
    for record in records:
        if canonical(record.distribution) == home:
            return f"{record.title} does not have it yet; pip install --upgrade {home}"
    return f"it is not installed; pip install {home}"


def _failures(records: Sequence[Record]) -> str:
    names = ", ".join(record.title for record in records if record.state is PluginState.BROKEN)
    return f" ({names} failed to load: see `relax plugins list`)" if names else ""


def missing_anywhere(name: str, records: Sequence[Record]) -> RelaxError:
    """Make the error for an unknown name without a kind: the first kind that knows something of it decides."""
    wanted, _, bare = name.rpartition(":")
    for kind in KINDS.values():
        if record := _would_offer(kind, wanted, bare, records):
            return _unloaded(kind, bare, record)
        if fix := _installable(kind, wanted, bare, records):
            return ConfigError("NAME", repr(name), f"as {kind.name}, {fix}")
    known = {component.name for record in records for _, component in record.components}
    known |= {record.distribution for record in records}
    return ConfigError("NAME", repr(name), f"no plugin has it; {did_you_mean(bare, known)}{_failures(records)}")


def extra_for(distribution: str, error: BaseException) -> str:
    """Name the `distribution[extra]` to install where one of its extras brings the module that is missing; else empty."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    from packaging.requirements import Requirement

    wanted = canonical(error.name.partition(".")[0])
    try:
        lines = requires(distribution) or []
    except PackageNotFoundError:
        return ""  # a single file, or a class passed from Python: they have no extras
    for requirement in (Requirement(line) for line in lines):
        extra = re.search(r'extra == "([^"]+)"', str(requirement.marker or ""))
        if extra and canonical(requirement.name) == wanted:
            return f"{distribution}[{extra[1]}]"
    return ""
