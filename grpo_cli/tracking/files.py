"""The run folder's row files: metrics, groups, samples, eval and eval_problems, one JSON object a line.

They are the truth about a run. A killed process loses nothing that was written; knows nothing of wandb or the terminal.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from grpo_cli.runfolder import finite

KINDS = ("metrics", "groups", "samples", "eval", "eval_problems")


class RowFiles:
    """Append-only files, opened empty (resume_step None) or cut back to the rows with step <= resume_step."""

    def __init__(self, run_dir: Path, resume_step: int | None):
        self.damaged = 0
        """Whole lines left out on resume since they hold no row; a torn last line does not count."""
        self._files = {}
        for kind in KINDS:
            path = run_dir / f"{kind}.jsonl"
            kept = b""
            if resume_step is not None and path.exists():
                lines, damaged = _lines(path, resume_step)
                kept = b"".join(line for line, _ in lines)
                self.damaged += damaged
            _replace(path, kept)
            self._files[kind] = open(path, "ab", buffering=0)  # noqa: SIM115

    def append(self, kind: str, rows: list[dict[str, Any]]) -> None:
        """Hand the rows to the OS in one write, so that a kill leaves at most one torn last line."""
        file = self._files[kind]
        # ASCII: the separators U+2028 and U+0085 in a completion must not look like line ends to a reader.
        data = "".join(json.dumps(finite(row), allow_nan=False) + "\n" for row in rows).encode("ascii")
        size = os.fstat(file.fileno()).st_size
        try:
            while data:  # a full disk first takes a part, and says so at the next try
                data = data[file.write(data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise OSError(error.errno, error.strerror, file.name) from error

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def read_rows(path: Path, last_step: int) -> list[dict[str, Any]]:
    """The rows with step <= last_step; none when there is no file."""
    return [row for _, row in _lines(path, last_step)[0]] if path.exists() else []


def last_row(path: Path) -> dict[str, Any]:
    """The last whole row, from the end of the file alone; empty when there is none yet."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            return json.loads(file.read().split(b"\n")[-2])
    except (OSError, ValueError, IndexError):
        return {}


def _lines(path: Path, last_step: int) -> tuple[list[tuple[bytes, dict[str, Any]]], int]:
    kept, damaged = [], 0
    for line in path.read_bytes().split(b"\n")[:-1]:  # what follows the last line end is a torn row, or nothing
        try:
            row = json.loads(line)
            if row["step"] <= last_step:
                kept.append((line + b"\n", row))
        except (ValueError, TypeError, KeyError):
            damaged += 1
    return kept, damaged


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
