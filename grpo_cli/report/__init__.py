"""A report on a run, on a sweep or several folders, or a list of what lies below a folder. Reads files alone, and writes three."""

from pathlib import Path

from grpo_cli.report import many, one
from grpo_cli.report.pages import Document, as_json, html, markdown, terminal
from grpo_cli.report.read import flat, is_run, jobs_in, read_run, runs_below
from grpo_cli.runfolder import write_json, write_text


def run(folders: list[Path], save: Path | None, default: dict) -> str:
    """Write report.html, report.md and report.json into `save` or the first folder; the summary for the terminal.

    `default` is the default config. ValueError when a folder holds nothing to report on.
    """
    document = _document(folders, flat(default))
    place = save or folders[0]
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_text(place / "report.html", html(document))
        write_text(place / "report.md", markdown(document))
        write_json(place / "report.json", as_json(document))
    except OSError as error:
        raise OSError(f"cannot write into {place}: {error.strerror}: try save=FOLDER") from error
    return f"{terminal(document)}\n\nThe report: {place / 'report.html'} (and report.md, report.json)"


def _document(folders: list[Path], default: dict) -> Document:
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: name a run folder, a sweep folder, or one above them, such as outputs")
        jobs = [folder] if is_run(folder) else jobs_in(folder)
        if not jobs and len(folders) == 1 and (below := runs_below(folder)):
            return many.listing(folder, [read_run(place, light=True) for place in below])
        if not jobs:
            raise ValueError(f"{folder} holds no run of grpo-train: name a run folder, a sweep folder, or one above them, such as outputs")
        found += [job for job in jobs if job not in found]
    runs = [read_run(place) for place in found]
    if len(found) == 1 and found == folders:
        if not runs[0].config:
            raise ValueError(f"{folders[0]}: {'; '.join(runs[0].missing)} ({runs[0].state})")
        return one.document(runs[0], default)
    title = (
        f"Sweep {folders[0].resolve().name}"
        if len(folders) == 1
        else f"{len(folders)} folders: {', '.join(folder.name for folder in folders)}"
    )
    return many.document(runs, title, default)
