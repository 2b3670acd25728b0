import io
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from tracked import feed, metrics_of, sample_of

from grpo_cli.tracking import console as console_module
from grpo_cli.tracking.console import LiveView, PlainView, duration, evaluation_text, number, visible

EVALUATION = {
    "eval/accuracy": 0.7812,
    "eval/accuracy_se": 0.0129,
    "eval/accuracy_n": 1024,
    "eval/accuracy_greedy": 0.99,
    "eval/accuracy_greedy_se": 0.0062,
    "eval/accuracy_greedy_n": 256,
    "eval/pass@4": 0.95,
    "eval/reward": None,
}


def view_of(width=80, height=24, **options):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None, **options)
    view = LiveView(100, 10, console)
    view.close()  # drawn by hand from here on
    return view, console


def drawn(view, console):
    with console.capture() as capture:
        console.print(view)
    return capture.get().splitlines()


def fill(view, steps=60):
    for step in range(1, steps + 1):
        view.step(step, metrics_of(step) | {"optim/lr": 1e-3, "group/frac_zero_std": 0.25, "time/step_s": 0.1})
    view.evaluation(0, EVALUATION | {"eval/accuracy": 0.28, "eval/accuracy_greedy": 0.07})
    view.evaluation(20, EVALUATION)
    text = "<think>[bold]7+5[/bold]\n\x1b[31m\r" + "日本語" * 40 + "</think>"
    view.samples(20, [sample_of(20, total=0.5), sample_of(20, text, 2.0), sample_of(20, text, -1.0)])


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 40), (40, 10), (20, 3)])
def test_the_live_view_fits_its_terminal(width, height):
    view, console = view_of(width, height)
    fill(view)
    lines = drawn(view, console)
    assert max(map(cell_len, lines)) <= width and len(lines) < height


def test_the_live_view_shows_progress_courses_evaluations_and_the_best_and_worst_completion():
    view, console = view_of(100, 30)
    fill(view)
    text = "\n".join(drawn(view, console))
    for part in ("step 60/100", "ETA", "reward/mean", "▁▁", "█", "kl/reference", "optim/lr", "0.001", "held-out, step 0 → 20"):
        assert part in text
    assert re.search(r"accuracy +0.28 → 0.78 ±0.01 \(n=1024\) +▁█", text) and re.search(r"greedy +0.07 → 0.99 ±0.01", text)
    assert "reward 2 " in text and "reward -1 " in text and "reward 0.5" not in text


def test_completions_are_shown_as_they_are_and_cannot_steer_the_terminal():
    view, console = view_of(140, 40)
    fill(view)
    text = "\n".join(drawn(view, console))
    assert "[bold]7+5[/bold]⏎\\x1b[31m\\r日本" in text and "\x1b" not in text
    assert visible("a\x00\u202e\u2028\ud800ü") == "a\\x00\\u202e\\u2028\\ud800ü"


def test_a_view_without_any_values_yet_can_be_drawn():
    view, console = view_of()
    view.step(1, {"reward/mean": float("nan"), "kl/reference": None})
    view.samples(1, [])
    view.evaluation(1, {})
    assert drawn(view, console)[0].startswith("step 1/100")


def test_an_ascii_terminal_gets_ascii():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    console = Console(file=file, force_terminal=True, width=80, height=24, color_system=None)
    view = LiveView(100, 10, console)
    fill(view)
    view.finish("finished", "done", ["line"])
    file.flush()
    text = file.buffer.getvalue().decode("ascii")
    assert "0.28 -> 0.78 +-0.01" in text and "####" in text and "----" in text


def test_notes_and_the_final_panel_keep_their_brackets_and_long_commands():
    file = io.StringIO()
    view = LiveView(100, 10, Console(file=file, force_terminal=True, width=80, height=24, color_system=None))
    fill(view)
    view.note("dropped [3] rows [/red]")
    view.warn("[bold]")
    command = "grpo-train resume=" + "x" * 100
    view.finish("stopped", "eval/accuracy reached 0.9", [command])
    text = file.getvalue()
    assert "dropped [3] rows [/red]\n" in text and "warning: [bold]\n" in text and command + "\n" in text
    assert "stopped  eval/accuracy reached 0.9" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


def test_plain_lines_come_first_last_and_every_log_every(capsys):
    view = PlainView(25, 10)
    for step in range(1, 24):  # stopped early
        view.step(step, metrics_of(step) | {"time/step_s": 60.0})
    view.finish("stopped", "solved", ["run folder  x"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0] for line in lines[:-2]] == ["step  1", "step 10", "step 20", "step 23"]
    # One step of 60 s; 24 are left.
    assert lines[0] == "step  1/25  reward 0.25  group_std 0.5  kl 0.01  beta 0.04  len 24  1 steps/min  ETA 24:00"
    assert lines[-2:] == ["--- stopped: solved", "run folder  x"]


def test_what_a_step_did_not_measure_is_left_out_of_its_line(capsys):
    PlainView(25, 10).step(1, {"reward/mean": 1.0, "kl/reference": float("nan"), "kl/beta": 0.0})
    assert capsys.readouterr().out == "step  1/25  reward 1  beta 0\n"


def test_an_evaluation_is_one_line_of_what_was_measured():
    assert evaluation_text(EVALUATION) == "accuracy 0.78 ±0.01 (n=1024)  greedy 0.99 ±0.01 (n=256)  pass@4 0.95"


def test_numbers_and_durations_are_short():
    assert [number(x) for x in (0.03616, 24.13, 1234.5, 1e-5, 0)] == ["0.0362", "24.1", "1234", "1e-05", "0"]
    assert [duration(x) for x in (35.2, 754, 3723)] == ["0:35", "12:34", "1:02:03"]


def test_a_closed_pipe_does_not_end_the_training(tmp_path):
    # The reader takes one line and goes; the run goes on to its end with status 0.
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from tracked import metrics_of
from grpo_cli.config import TrackerName, TrackerSection, WandbMode
from grpo_cli.tracking import Tracker
section = TrackerSection(TrackerName.none, WandbMode.auto, "p", None, None, None, [])
tracker = Tracker(Path({str(tmp_path)!r}), section, config={{}}, total_steps=5000, log_every=1, resume_step=None, wandb_id=None, group=None,
                  run_name="r")
for step in range(1, 5001):
    tracker.step(step, metrics_of(step), [])
tracker.finish("finished", "", [])
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert (process.stderr.read(), process.wait(30)) == (b"", 0)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5000


def test_plain_output_to_an_ascii_stream_replaces_what_it_lacks(tmp_path):
    program = """
from grpo_cli.tracking.console import open_view
view = open_view(5, 1)
view.evaluation(0, {"eval/accuracy": 0.5, "eval/accuracy_se": 0.1})
view.note("日本")
"""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "eval step 0: accuracy 0.50 +-0.10\n??\n"


def test_a_live_view_that_fails_gives_way_to_plain_lines(track, monkeypatch, capsys):
    tracker = track(wandb=None)
    view, _ = view_of()
    tracker._view = view
    monkeypatch.setattr(view, "step", lambda *args: 1 / 0)
    feed(tracker, [1])
    tracker.finish("finished", "", [])
    said = capsys.readouterr().out
    assert "warning: the live view failed (ZeroDivisionError" in said and "step   1/100" in said and "--- finished" in said


def test_output_that_is_gone_leaves_the_run_alone(track, monkeypatch, tmp_path):
    tracker = track(wandb=None)
    monkeypatch.setattr(console_module, "print", lambda *args, **kwargs: 1 / 0, raising=False)
    feed(tracker, [1, 2])
    tracker.finish("finished", "", [])
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2


def test_a_terminal_gets_the_live_view_and_anything_else_plain_lines(monkeypatch):
    program = "from grpo_cli.tracking.console import open_view; view = open_view(5, 1); view.close(); print(type(view).__name__)"

    def said(**environment):
        master, slave = pty.openpty()
        subprocess.run([sys.executable, "-c", program], stdout=slave, env={**os.environ, **environment}, check=True)
        time.sleep(0.05)
        os.close(slave)
        output = os.read(master, 100_000).decode()
        os.close(master)
        return output

    assert "LiveView" in said(TERM="xterm") and "PlainView" in said(TERM="dumb")
    piped = subprocess.run([sys.executable, "-c", program], env={**os.environ, "FORCE_COLOR": "1"}, capture_output=True, text=True)
    assert piped.stdout == "PlainView\n"
