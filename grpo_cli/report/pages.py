"""One document, four ways to read it: HTML with charts, Markdown, JSON with every number, and lines for an 80-column terminal."""

import dataclasses
import textwrap
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from string import Template
from typing import Any

from grpo_cli.report.charts import Cells, Lines, legend, svg

COLUMNS = 80
MOST_TOLD = 8
"""Verdicts that are seen at first sight."""
LONG = 40
"""Characters from which on a cell is a text to be wrapped."""


@dataclass
class Table:
    head: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass
class Verdict:
    claim: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.claim} {self.evidence}"


@dataclass
class Section:
    title: str
    parts: list[str | Verdict | Table | Lines | Cells] = field(default_factory=list)


@dataclass
class Document:
    kind: str
    """run, sweep or list"""
    title: str
    about: str
    sections: list[Section]
    summary: list[str | Verdict | Table]
    """For the terminal."""
    data: dict[str, Any] = field(default_factory=dict)
    """Unrounded figures beside those of the charts and tables."""


def filled(document: Document) -> list[Section]:
    return [section for section in document.sections if section.parts]


def html(document: Document) -> str:
    body = [f"<h1>{escape(document.title)}</h1>", f'<p class="sub">{escape(document.about)}</p>']
    for section in filled(document):
        body.append(f"<h2>{escape(section.title)}</h2>")
        figures = [part for part in section.parts if isinstance(part, Lines | Cells)]
        verdicts = [part for part in section.parts if isinstance(part, Verdict)]
        texts = [f'<p class="verdict"><strong>{escape(v.claim)}</strong> {escape(v.evidence)}</p>' for v in verdicts]
        body += texts[:MOST_TOLD]
        if more := texts[MOST_TOLD:]:
            body.append(f"<details><summary>{len(more)} more verdicts</summary>{''.join(more)}</details>")
        body += [_html_table(p) if isinstance(p, Table) else f"<p>{escape(p)}</p>" for p in section.parts if isinstance(p, Table | str)]
        if figures:
            body.append(f'<div class="grid">{"".join(map(_figure, figures))}</div>')
    template = resources.files("grpo_cli.report").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=escape(document.title), body="\n".join(body))


def _figure(chart: Lines | Cells) -> str:
    axis = f' <span class="note">{escape(chart.y_label)}</span>' if isinstance(chart, Lines) else ""
    faint = 0 if isinstance(chart, Cells) else sum(series.faint for series in chart.series)  # they are drawn first
    keys = "".join(f'<button class="{kind}" data-n="{faint + n}">{escape(name)}</button>' for n, (kind, name) in enumerate(legend(chart)))
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    return f'<figure><h3>{escape(chart.title)}{axis}</h3><div class="legend">{keys}</div>{svg(chart)}{note}</figure>'


def _html_table(table: Table) -> str:
    def cell(text: str) -> str:
        return f'<td class="long">{escape(text)}</td>' if len(text) > LONG else f"<td>{escape(text)}</td>"

    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    rows = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'


def markdown(document: Document) -> str:
    lines = [f"# {_md(document.title)}", "", _md(document.about), ""]
    for section in filled(document):
        if all(isinstance(part, Lines) for part in section.parts):
            continue
        lines += [f"## {_md(section.title)}", ""]
        for part in section.parts:
            if isinstance(part, Table):
                lines += [*_md_table(part.head, part.rows), "", *([_md(part.note), ""] if part.note else [])]
            elif isinstance(part, Cells) and part.labelled:
                rows = [[name, *("" if v is None else f"{v:.3g}" for v in row)] for name, row in zip(part.rows, part.values, strict=True)]
                lines += [f"{_md(part.title)} ({_md(part.y_label)} by {_md(part.x_label)}):", "", *_md_table(["", *part.columns], rows), ""]
            elif isinstance(part, Verdict):
                lines += [f"- **{_md(part.claim)}** {_md(part.evidence)}", ""]
            elif isinstance(part, str):
                lines += [_md(part), ""]
    return "\n".join([*lines, "The charts are in report.html, their numbers in report.json.", ""])


def _md(text: str) -> str:
    text = " ".join(text.split())
    for mark in "\\`*_[]|":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("<", "&lt;")


def _md_table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(map(_md, row)) + " |" for row in [head, ["---"] * len(head), *rows]]


def as_json(document: Document) -> dict[str, Any]:
    kinds = {str: "text", Verdict: "verdict", Table: "table", Lines: "lines", Cells: "cells"}
    sections = [
        {
            "title": section.title,
            "parts": [{"kind": kinds[type(p)]} | ({"text": p} if isinstance(p, str) else dataclasses.asdict(p)) for p in section.parts],
        }
        for section in filled(document)
    ]
    return {"kind": document.kind, "title": document.title, "about": document.about, **document.data, "sections": sections}


def terminal(document: Document) -> str:
    lines = textwrap.wrap(document.title, COLUMNS) + textwrap.wrap(document.about, COLUMNS)
    for part in document.summary:
        lines += ["", *(columns(part) if isinstance(part, Table) else textwrap.wrap(str(part), COLUMNS, subsequent_indent="  "))]
    return "\n".join(lines)


def columns(table: Table) -> list[str]:
    """The table in 80 columns: the widest column gives way."""
    rows = [table.head, *table.rows]
    widths = [max(len(row[c]) for row in rows) for c in range(len(table.head))]
    while sum(widths) + 2 * (len(widths) - 1) > COLUMNS:
        widths[widths.index(max(widths))] -= 1
    short = [[text if len(text) <= width else text[: width - 2] + ".." for text, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in short]
