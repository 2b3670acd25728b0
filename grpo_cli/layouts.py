"""What the rows of well-known data sets say, as a question, an answer and the fields that reward rules read.

Knows nothing of files, splits or prompts.
"""

import re
from collections.abc import Callable
from typing import Any

from grpo_cli.config import Layout


def lay_out(row: dict[str, Any], layout: Layout, where: str) -> dict[str, Any]:
    """What a layout adds to a row: {"question": "[1, 2, 5] = 8", "answer": 8} to {"nums": [5, 1, 2], "target": 8} for countdown.

    ValueError names `where` and the field that is missing or of another kind.
    """
    return _LAYOUTS[layout](_Row(row, where))


class _Row(dict):
    """A row that checks what is taken from it."""

    def __init__(self, row: dict, where: str):
        super().__init__(row)
        self.where = where

    def text(self, field: str) -> str:
        return self._take(field, "a text", lambda value: isinstance(value, str) and value.strip())

    def integer(self, field: str) -> int:
        return self._take(field, "a whole number", _is_integer)

    def integers(self, field: str) -> list[int]:
        return self._take(
            field, "a list of whole numbers", lambda value: isinstance(value, list) and value and all(map(_is_integer, value))
        )

    def texts(self, field: str) -> list[str]:
        return self._take(field, "a list of texts", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value))

    def _take(self, field: str, wanted: str, fits: Callable[[Any], Any]) -> Any:
        if field not in self:
            raise ValueError(f"{self.where} has no field {field!r} (it has: {', '.join(map(str, self)) or 'none'})")
        if not fits(self[field]):
            raise ValueError(f"{self.where}: field {field!r} must be {wanted}, not {self[field]!r}")
        return self[field]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _svamp(row: _Row) -> dict[str, Any]:
    story = row.text("Body").strip()
    comma = "" if story.endswith((".", ",")) else ","  # "If there are 10 on his shelf now" goes on in the question
    return {"question": f"{story}{comma} {row.text('Question').strip()}"}


def _countdown(row: _Row) -> dict[str, Any]:
    """The question is the same for every order of the numbers, so that one puzzle is never on both sides of a split."""
    return {"question": f"{sorted(row.integers('nums'))} = {row.integer('target')}", "answer": row["target"]}


def _mbpp(row: _Row) -> dict[str, Any]:
    """The full set says `text` and `test_setup_code`, the sanitized one `prompt` and `test_imports`."""
    row.integer("task_id")
    program, tests = row.text("code"), row.texts("test_list")
    names = [name for name in re.findall(r"^def (\w+)", program, re.MULTILINE) if re.search(rf"\b{name}\b", "\n".join(tests))]
    setup = "\n".join(row.texts("test_imports")) if "test_imports" in row else row.get("test_setup_code", "")
    question = row.text("text" if "text" in row else "prompt")
    first_test, entry_point = "".join(tests[:1]), "".join(names[:1])
    return {"question": question, "first_test": first_test, **_program("asserts", tests, entry_point, setup, "", program)}


def _humaneval(row: _Row) -> dict[str, Any]:
    begin = row.text("prompt")
    program = begin + row.text("canonical_solution")
    return {"question": begin, **_program("check", [row.text("test")], row.text("entry_point"), "", begin, program)}


def _program(mode: str, tests: list[str], entry_point: str, setup: str, prompt_code: str, solution: str) -> dict[str, Any]:
    """What the code rule reads; the gold answer is the reference program."""
    fields = {"mode": mode, "tests": tests, "entry_point": entry_point, "setup": setup, "prompt_code": prompt_code, "solution": solution}
    return {"answer": solution, **fields}


_LAYOUTS = {
    Layout.plain: lambda row: {},
    Layout.svamp: _svamp,
    Layout.countdown: _countdown,
    Layout.mbpp: _mbpp,
    Layout.humaneval: _humaneval,
}
