"""What a run shows: one live view on a terminal, plain lines elsewhere. Both have the same methods."""

import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SHOWN = {
    "reward/mean": "reward",
    "reward/group_std": "group_std",
    "kl/reference": "kl",
    "kl/beta": "beta",
    "completion/tokens": "len",
    "group/frac_zero_std": "zero_std",
    "reward/signal_frac": "signal",
    "optim/lr": "lr",
}
SPARK_STEPS = 40
STYLE = {"finished": "green", "stopped": "green", "interrupted": "yellow", "failed": "red"}


def on_terminal() -> bool:
    """Something can be drawn in place. From here on an ASCII terminal shows ? for what it lacks instead of ending the run."""
    if sys.stdout is not None:
        with contextlib.suppress(Exception):
            sys.stdout.reconfigure(errors="replace")
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def open_view(total_steps: int, log_every: int) -> "LiveView | PlainView":
    if on_terminal():
        with contextlib.suppress(Exception):
            return LiveView(total_steps, log_every)
    return PlainView(total_steps, log_every)


class Pace:
    """Speed over the last steps, and what it says about the rest."""

    def __init__(self, total_steps: int):
        self.total_steps, self.started, self.ended = total_steps, time.monotonic(), None
        self._seen: deque[tuple[int, float]] = deque(maxlen=50)

    def add(self, step: int, step_s: float | None) -> None:
        now = time.monotonic()
        if not self._seen and step_s:
            self._seen.append((step - 1, now - step_s))
        self._seen.append((step, now))

    @property
    def step(self) -> int | None:
        return self._seen[-1][0] if self._seen else None

    @property
    def steps_per_s(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (first, start), (last, end) = self._seen[0], self._seen[-1]
        return (last - first) / (end - start) if end > start and last > first else None

    @property
    def elapsed_s(self) -> float:
        return (self.ended or time.monotonic()) - self.started

    @property
    def left_s(self) -> float | None:
        speed = self.steps_per_s
        return None if speed is None else max(0, self.total_steps - self._seen[-1][0]) / speed


class PlainView:
    """One line every log_every steps, and one for each evaluation."""

    def __init__(self, total_steps: int, log_every: int):
        self.total_steps, self.log_every = total_steps, log_every
        self._pace = Pace(total_steps)
        self._started, self._held_back = False, None

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self._pace.add(step, metrics.get("time/step_s"))
        parts = [f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"]
        parts += [f"{SHOWN[name]} {number(metrics[name])}" for name in SHOWN if name != "optim/lr" and is_number(metrics.get(name))]
        if self._pace.steps_per_s:
            parts += [f"{number(60 * self._pace.steps_per_s)} steps/min", f"ETA {duration(self._pace.left_s)}"]
        line = "  ".join(parts)
        if rules := rule_texts(metrics):
            line += "\n  rules: " + "  ".join(f"{name} {text}" for name, text in rules.items())
        if not self._started or step % self.log_every == 0 or step >= self.total_steps:
            self._print(line)
            line = None
        self._started, self._held_back = True, line

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        pass

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._print(f"eval step {step}: {evaluation_text(metrics)}")

    def status(self, text: str) -> None:
        if not self._started:  # later ones would repeat at every evaluation
            self._print(f"{text} ...")

    def note(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}")

    def finish(self, status: str, reason: str, lines: list[str]) -> None:
        if self._held_back:
            self._print(self._held_back)
        self._print("\n".join([f"--- {status}" + (f": {reason}" if reason else ""), *lines]))

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        if not encodes("±", sys.stdout):
            text = text.replace("±", "+-")
        print(text, flush=True)


class LiveView:
    """Progress, current values with their recent course, evaluations and two completions, drawn in place."""

    def __init__(self, total_steps: int, log_every: int, console: "Console | None" = None):
        from rich.live import Live

        self.total_steps, self.log_every = total_steps, log_every
        self.console = console or quiet_console()
        self._unicode = self.console.encoding.startswith("utf")
        self._pace = Pace(total_steps)
        self._step, self._status = 0, "starting"
        self._course: dict[str, deque[float]] = {name: deque(maxlen=SPARK_STEPS) for name in SHOWN}
        self._evaluations: list[tuple[int, dict[str, float]]] = []
        self._samples: tuple[int, list[dict[str, Any]]] = (0, [])
        self._rules: dict[str, str] = {}
        self._lock = threading.Lock()  # the view is drawn by rich's own thread
        self._live = Live(
            console=self.console,
            get_renderable=lambda: self,
            refresh_per_second=4,
            # 2> file must stay a file
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        )
        self._live.start()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        with self._lock:
            self._pace.add(step, metrics.get("time/step_s"))
            self._step, self._status, self._rules = step, "", rule_texts(metrics)
            for name, course in self._course.items():
                if is_number(metrics.get(name)):
                    course.append(metrics[name])

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Show the best and the worst of them."""
        ordered = sorted(rows, key=lambda row: row["total"] if is_number(row["total"]) else -math.inf, reverse=True)
        with self._lock:
            self._samples = (step, [ordered[0], ordered[-1]] if len(ordered) > 1 else ordered)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        with self._lock:
            self._evaluations.append((step, metrics))

    def status(self, text: str) -> None:
        with self._lock:
            self._status = text

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def finish(self, status: str, reason: str, lines: list[str]) -> None:
        from rich.text import Text

        with self._lock:
            self._pace.ended = time.monotonic()
            self._status = status
        self.close()
        style = STYLE.get(status, "")
        title = Text(f" {status}", style=f"bold {style}").append(f"  {reason} " if reason else " ", style="default not bold")
        self.console.print()
        # A panel without sides: a command longer than the line can still be copied.
        self.console.rule(title, align="left", style=style, characters="─" if self._unicode else "-")
        for line in lines:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self.console.rule(style=style, characters="─" if self._unicode else "-")

    def close(self) -> None:
        self._live.stop()

    def __rich_console__(self, console: "Console", options: Any):
        with self._lock:
            lines = self._lines(options.max_width, console.height)
        for line in lines[: max(1, console.height - 1)]:
            line.no_wrap, line.overflow = True, "ellipsis" if self._unicode else "crop"
            yield line

    def _lines(self, width: int, height: int) -> "list[Text]":
        from rich.text import Text

        lines = [self._progress(width), Text()]
        spark_width = max(0, min(SPARK_STEPS, width - 32))
        for name, course in self._course.items():
            if course:
                line = Text.assemble((f"{name:<20}", "dim"), (f"{number(course[-1]):>9}  ", "bold"))
                lines.append(line.append(self._sparkline(list(course)[-spark_width:] if spark_width else []), style="cyan"))
        for name, text in self._rules.items():
            text = text if self._unicode else text.replace("±", "+-")
            lines.append(Text.assemble((f"{f'rule {name}':<20}", "dim"), (f"  {text}", "bold")))
        lines += self._evaluation_lines()
        step, samples = self._samples
        room = (height - 2 - len(lines)) // max(1, len(samples))
        if samples and room > 1:
            lines.append(Text())
            for row in samples:
                lines += self._sample_lines(step, row, width, min(room, 5))
        return lines

    def _progress(self, width: int) -> "Text":
        from rich.text import Text

        left = f"step {self._step}/{self.total_steps} "
        right = f" {duration(self._pace.elapsed_s)}"
        if self._pace.left_s is not None and self._pace.ended is None:
            right += f"  ETA {duration(self._pace.left_s)}"
        if self._status:
            right += f"  {self._status}"
        elif self._pace.steps_per_s:
            right += f"  {number(60 * self._pace.steps_per_s)} steps/min"
        bar = max(0, min(60, width - len(left) - max(len(right), 36)))
        done = min(bar, round(bar * self._step / self.total_steps))
        full, empty = ("━", "─") if self._unicode else ("#", "-")
        return Text.assemble((left, "bold"), (full * done, "green"), (empty * (bar - done), "dim"), right)

    def _evaluation_lines(self) -> "list[Text]":
        from rich.text import Text

        if not self._evaluations:
            return []
        (first_step, first), (last_step, last) = self._evaluations[0], self._evaluations[-1]
        arrow = "→" if self._unicode else "->"
        title = f"held-out, step {first_step}" + (f" {arrow} {last_step}" if last_step != first_step else "")
        lines = [Text(), Text(title, style="dim")]
        for name, label in evaluation_names(last).items():
            course = [row[name] for _, row in self._evaluations if is_number(row.get(name))]
            before = f"{first[name]:.2f} {arrow} " if len(course) > 1 and is_number(first.get(name)) else ""
            now = evaluation_value(name, last)
            if not self._unicode:
                now = now.replace("±", "+-")
            line = Text.assemble((f"{label:<20}", "dim"), f"{before:>9}", (f"{now:<24}", "bold"))
            lines.append(line.append(self._sparkline(course[-SPARK_STEPS:]) if len(course) > 1 else "", style="magenta"))
        return lines

    def _sample_lines(self, step: int, row: dict[str, Any], width: int, count: int) -> "list[Text]":
        from rich.text import Text

        rules = "  ".join(f"{rule} {number(value)}" for rule, value in row["rewards"].items() if is_number(value))
        total = number(row["total"]) if is_number(row["total"]) else "-"
        title = Text.assemble(
            (f"step {step}, reward {total}", "bold"), (f"  {rules}  {row['tokens']} tokens, ended by {row['ended']}", "dim")
        )
        # The prompt's end holds the question; markers of a chat template and examples stand before it.
        prompt, completion = visible(row["prompt"], self._unicode), visible(row["completion"], self._unicode)
        room = max(width // 2, width * (count - 2) - len(completion))
        prompt = "..." + prompt[3 - room :] if len(prompt) > room else prompt
        body = Text.assemble((f"{prompt} ", "dim") if count > 2 else "", completion)
        wrapped = list(body.wrap(self.console, max(1, width), overflow="fold"))
        shown = wrapped[: count - 1]
        if len(wrapped) > len(shown):
            shown[-1].truncate(max(1, width - 4))
            shown[-1].append(" ...")
        return [title, *shown]

    def _sparkline(self, values: list[float]) -> str:
        blocks = "▁▂▃▄▅▆▇█" if self._unicode else "_.:-=+*#"
        if not values:
            return ""
        low, high = min(values), max(values)
        scale = (len(blocks) - 1) / (high - low) if high > low else 0
        return "".join(blocks[int((value - low) * scale + 0.5)] for value in values)


def quiet_console() -> "Console":
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            """rich would end the program here."""
            raise

    return QuietConsole(highlight=False)


def rule_texts(metrics: dict[str, float]) -> dict[str, str]:
    """Mean, standard deviation and errors of each rule in a step: 0.81 ±0.39 (0 errors)."""
    texts = {}
    for name, count in metrics.items():
        if name.startswith("reward/errors/"):
            rule = name.removeprefix("reward/errors/")
            mean, std = metrics.get(f"reward/rule/{rule}"), metrics.get(f"reward/rule_std/{rule}")
            figures = f"{number(mean)} ±{number(std)}" if is_number(mean) and is_number(std) else "-"
            texts[rule] = f"{figures} ({count} error{'s' * (count != 1)})"
    return texts


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def evaluation_names(metrics: dict[str, float]) -> dict[str, str]:
    """Metric -> label, without the standard errors and counts that go with them."""
    labels = {"eval/accuracy": "accuracy", "eval/accuracy_greedy": "greedy"}
    names = [name for name in metrics if name.startswith("eval/") and not name.endswith(("_se", "_n")) and is_number(metrics[name])]
    return {name: labels.get(name, name.removeprefix("eval/")) for name in names}


def evaluation_value(name: str, metrics: dict[str, float]) -> str:
    error, count = metrics.get(f"{name}_se"), metrics.get(f"{name}_n")
    text = f"{metrics[name]:.2f}" + (f" ±{error:.2f}" if is_number(error) else "")
    return text + (f" (n={count:.0f})" if is_number(count) else "")


def evaluation_text(metrics: dict[str, float]) -> str:
    return "  ".join(f"{label} {evaluation_value(name, metrics)}" for name, label in evaluation_names(metrics).items())


def visible(text: str, unicode: bool = True) -> str:
    """One line in which a terminal finds nothing to obey: line ends and control characters are spelled out."""
    line_end = "⏎" if unicode else "\\n"
    return "".join(c if c.isprintable() else line_end if c == "\n" else ascii(c)[1:-1] for c in text)


def encodes(text: str, stream: TextIO | None) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeError, LookupError):
        return False
    return True
