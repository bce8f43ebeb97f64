# SPDX-License-Identifier: Apache-2.0
"""The configuration reference as Markdown, made from the models: core tables, then every component that imports here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relax_core.api.errors import RelaxError
from relax_core.api.kinds import BY_TABLE
from relax_core.options.documentation import (
    FieldDoc,
    TableDoc,
    component_documentation,
    core_documentation,
    summary,
    table_docs,
)
from relax_core.plugins.catalogue import Catalogue


def reference(catalogue: Catalogue | None = None) -> str:
    """The whole page; without a catalogue, the core's part of it."""
    return "\n".join(_page(catalogue)).rstrip() + "\n"


def _page(catalogue: Catalogue | None) -> Iterator[str]:
    yield "# Configuration reference"
    for doc in core_documentation():
        yield from _section(doc, "##" if doc.name.count(".") == 0 else "###")
    for table in BY_TABLE:
        yield from _section(component_documentation(table), "##")
        for name in catalogue.names(BY_TABLE[table].name) if catalogue else ():
            yield from _component(catalogue, table, name)


def _component(catalogue: Catalogue | None, table: str, name: str) -> Iterator[str]:
    if catalogue is None:
        return
    kind = BY_TABLE[table].name
    found = catalogue.find(kind, name)
    yield from ("", f"### `{name}`", "", f"{found.component.help}. From `{found.distribution}`.")
    try:
        model = catalogue.target(kind, name).options_model()
    except RelaxError as error:
        yield from ("", f"Its options are not known here: {error}.")
        return
    docs = list(table_docs(name, model))
    if text := summary(model):
        yield from ("", text)
    yield from _rows(docs[0].fields)
    for doc in docs[1:]:
        yield from _section(doc, "####")


def _section(doc: TableDoc, level: str) -> Iterator[str]:
    brackets = f"[[{doc.name}]]" if doc.many else f"[{doc.name}]"
    yield from ("", f"{level} `{brackets}`" if doc.name else f"{level} Top level")
    if doc.text:
        yield from ("", doc.text)
    yield from _rows(doc.fields)


def _rows(fields: Sequence[FieldDoc]) -> Iterator[str]:
    if not fields:
        return
    yield from ("", "| key | type | default | |", "|---|---|---|---|")
    for field in fields:
        default = "required" if field.required else f"`{field.default}`" if field.default else ""
        yield f"| `{field.name}` | {_cell(field.type)} | {_cell(default)} | {_cell(field.text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
