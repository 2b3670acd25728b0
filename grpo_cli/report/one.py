"""The report on one run."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from grpo_cli.report.arms import shown
from grpo_cli.report.charts import Cells, Lines, Series, thinned
from grpo_cli.report.pages import Document, Section, Table, Verdict
from grpo_cli.report.read import Run, rows
from grpo_cli.report.stats import Interval, interval, over_seeds_and_problems

PARTS = ("trained", "all_right", "all_wrong", "tied", "truncated", "filtered", "unscored")
"""Of the ledger."""
CLASSES = ("always solved", "learned", "in between", "forgotten", "never solved", "seen once")
MAP_ROWS, MAP_COLUMNS, STRETCHES = 60, 24, 50


def document(run: Run, default: dict) -> Document:
    """`default` is the flat default config, to tell what this run changed."""
    groups, samples = (rows(run.folder / f"{name}.jsonl", run.missing) for name in ("groups", "samples"))
    of_verdict = {"all_right": 1.0, "all_wrong": 0.0}
    trained = [(str(row.get("problem")), row["step"], of_verdict.get(row.get("verdict"), 0.5)) for row in groups]
    heldout = [(problem, step, share) for step, solved in run.solved.items() for problem, share in solved.items()]
    words, glance = [*_gain(run), *_signal(run)], Table(["figure", "first, last, best"], list(_figures(run)))
    sections = [
        Section("In short", [*words, glance]),
        Section("Curves", [chart for chart in _curves(run) if any(len(series.x) > 1 for series in chart.series)]),
        Section("Training problems", _problem_map(trained, "all right dark, mixed half, all wrong pale")),
        Section("Held-out problems", _problem_map(heldout, "the share of its samples that are right")),
        Section("The same problem over time", list(_completions(samples))),
        Section("What differs from the default config", [differences(run.config, default)]),
        Section("Environment", [Table(["what", "value"], [list(pair) for pair in _environment(run)])]),
        Section("Missing or damaged", list(run.missing)),
    ]
    about = f"{run.folder}: {run.state}"
    return Document("run", f"Run {run.folder.resolve().name}", about, sections, [*words, glance, *run.missing], {"summary": run.summary})


def differences(config: dict, default: dict) -> Table | str:
    keys = [key for key in {**config, **default} if config.get(key) != default.get(key) and key not in ("seed", "resume")]
    changed = [[key, shown(config.get(key, "-")), shown(default.get(key, "-"))] for key in keys]
    return Table(["key", "here", "default"], changed) if keys else "None: these are the defaults."


def points(difference: Interval) -> str:
    """9.1 points [6.0, 12.2]"""
    around = f"[{100 * difference.low:.1f}, {100 * difference.high:.1f}]"
    return f"{100 * difference.mean:.1f} points {around if difference.low < difference.high else '(no spread was measured)'}"


def _gain(run: Run) -> list[Verdict]:
    if len(run.evals) < 2:
        return []
    first, last = run.evals[0], run.evals[-1]
    solved = [run.solved.get(row["step"], {}) for row in (first, last)]
    if ids := sorted(solved[0].keys() & solved[1].keys()):
        d_SP = np.array([[solved[1][i] - solved[0][i] for i in ids]])
        gain, covers = over_seeds_and_problems(d_SP.mean(axis=1), d_SP), f"on the same {len(ids)} problems"
    else:
        variance = sum((row.get("eval/accuracy_se") or 0) ** 2 for row in (first, last))
        gain = interval(last["eval/accuracy"] - first["eval/accuracy"], [(variance, max(1, last.get("eval/accuracy_greedy_n", 2) - 1))])
        covers = "standard errors over problems, unpaired"
    verb = "did not move beyond the noise" if gain.low <= 0 <= gain.high else "rose" if gain.mean > 0 else "fell"
    ends = f"from {first['eval/accuracy']:.2f} at step {first['step']} to {last['eval/accuracy']:.2f} at step {last['step']}"
    return [Verdict(f"Held-out accuracy {verb}", f"{ends}: {points(gain)} ({covers}; one seed, so it says nothing of other seeds).")]


def _signal(run: Run) -> list[Verdict]:
    counts = {part: run.metrics[-1].get(f"ledger/completions/{part}") or 0 for part in PARTS} if run.metrics else {}
    if not (total := sum(counts.values())):
        return []
    shares = {part: 100 * count / total for part, count in counts.items()}
    lost = ", ".join(f"{shares[part]:.0f} % {part.replace('_', ' ')}" for part in PARTS[1:] if shares[part] >= 0.5)
    return [Verdict(f"{shares['trained']:.0f} % of completions gave a reward gradient", f"(of all {total}: {lost or 'none was wasted'}).")]


def _figures(run: Run) -> Iterator[list[str]]:
    for name, label in (
        ("eval/accuracy", "sampled accuracy"),
        ("eval/accuracy_greedy", "greedy accuracy"),
        ("eval/reward", "held-out reward"),
    ):
        if values := [row[name] for row in run.evals if row.get(name) is not None]:
            error = run.evals[-1].get(f"{name}_se")
            yield [label, f"{values[0]:.3f}, {values[-1]:.3f}{f' (standard error {error:.3f})' if error else ''}, {max(values):.3f}"]
    if run.metrics:
        yield ["steps", f"{run.metrics[-1]['step']} of {run.config.get('steps')}"]
    if run.evals:
        yield ["spent", ", ".join(f"{spent[-1]:.0f} {unit}" for unit, spent in run.spent.items())]


def _environment(run: Run) -> Iterator[tuple[str, str]]:
    yield "overrides", " ".join(map(str, run.summary.get("overrides") or [])) or "none"
    gate = run.summary.get("gate") or {}
    told = {key: run.summary.get(key) for key in ("started", "device", "seed", "peak_memory_gib", "sandboxed")}
    told |= {f"reward gate, {key}": value for key, value in gate.items() if isinstance(value, (int, float))}
    yield from ((key, str(value)) for key, value in (told | (run.summary.get("versions") or {})).items() if value is not None)


# --- curves ------------------------------------------------------------------------------------------------------------


def _curves(run: Run) -> Iterator[Lines]:
    def line(name: str, metric: str) -> Series:
        return Series(name, *thinned(*run.series(metric)))

    evals = [_evaluations(run, "sampled", "eval/accuracy"), _evaluations(run, "greedy", "eval/accuracy_greedy")]
    yield Lines("Held-out accuracy", "step", "share right", evals, "Bands: 95 % interval over problems.")
    reward, spread = line("reward", "reward/mean"), line("std", "reward/group_std")
    if reward.x == spread.x:
        reward.low, reward.high = ([m + sign * s for m, s in zip(reward.y, spread.y, strict=True)] for sign in (-1, 1))
    yield Lines("Reward", "step", "mean of the batch", [reward], "Band: the std within a group, averaged over the groups.")
    shares = {"zero std": "group/frac_zero_std", "all right": "group/frac_all_right", "all wrong": "group/frac_all_wrong"}
    yield Lines("Groups without contrast", "step", "share of groups", [line(*pair) for pair in shares.items()])
    beta, cut = line("beta", "kl/beta"), line("truncated", "completion/truncated_frac")
    steady = f" Beta is {beta.y[0]:g} throughout." if len(set(beta.y)) == 1 else ""
    yield Lines("KL to the reference", "step", "nats per completion", [line("KL", "kl/sequence")], f"By the k3 estimator.{steady}")
    yield from [] if steady else [Lines("KL coefficient", "step", "beta", [beta])]
    yield Lines("Length", "step", "tokens per completion", [line("length", "completion/tokens")])
    yield from [Lines("Cut off at the limit", "step", "share of completions", [cut])] if any(cut.y) else []
    yield Lines("Entropy", "step", "nats per token", [line("entropy", "policy/entropy")])
    yield from [_ledger(run)] if run.metrics and "ledger/completions/trained" in run.metrics[-1] else []


def _evaluations(run: Run, name: str, metric: str) -> Series:
    found = [(row["step"], row[metric], 1.96 * (row.get(f"{metric}_se") or 0)) for row in run.evals if row.get(metric) is not None]
    steps, values = [step for step, _, _ in found], [value for _, value, _ in found]
    return Series(name, steps, values, [v - h for _, v, h in found], [v + h for _, v, h in found], dashed=name == "greedy")


def _ledger(run: Run) -> Lines:
    """What became of the completions, as shares of each stretch of steps."""
    stretches = np.array_split(np.arange(len(run.metrics)), min(len(run.metrics), STRETCHES))
    x = [float(np.mean([run.metrics[i]["step"] for i in stretch])) for stretch in stretches]
    totals = {part: [row.get(f"ledger/completions/{part}") or 0 for row in run.metrics] for part in PARTS}
    sums = {part: np.diff([0, *(total[stretch[-1]] for stretch in stretches)]) for part, total in totals.items() if total[-1]}
    whole, below, series = np.maximum(sum(sums.values()), 1), np.zeros(len(x)), []
    for part, values in sums.items():
        above = below + values / whole
        series.append(Series(part.replace("_", " "), x, (values / whole).tolist(), below.tolist(), above.tolist()))
        below = above
    note = "Trained: in a group whose rewards gave an advantage."
    return Lines("Where the completions went", "step", "share", series, note, stacked=True)


# --- problems ----------------------------------------------------------------------------------------------------------


def _class(shares: list[float]) -> str:
    if len(shares) == 1 or min(shares) == 1 or max(shares) == 0:
        return "seen once" if len(shares) == 1 else "always solved" if min(shares) == 1 else "never solved"
    change = shares[-1] - shares[0]
    return "learned" if change >= 0.5 else "forgotten" if change <= -0.5 else "in between"


def _problem_map(visits: list[tuple[str, int, float]], shade: str) -> list:
    """Problems by what became of them, from (problem, step, how far it was solved)."""
    seen: dict[str, list[tuple[int, float]]] = {}
    for problem, step, share in visits:
        seen.setdefault(problem, []).append((step, share))
    classes = {problem: _class([share for _, share in shares]) for problem, shares in seen.items()}
    counts = Counter(classes.values())
    listed = [problem for problem in seen if classes[problem] != "seen once"]
    if not seen:
        return []
    told = f"{len(seen)} problems: {', '.join(f'{counts[name]} {name}' for name in CLASSES if counts[name])}."
    if not listed:
        return [told]
    listed.sort(key=lambda problem: (CLASSES.index(classes[problem]), -seen[problem][-1][1], seen[problem][0][1]))
    picked = spread_out(listed, MAP_ROWS)
    steps = np.array(sorted({step for problem in picked for step, _ in seen[problem]}))
    stretches = np.array_split(steps, min(len(steps), MAP_COLUMNS))

    def shade_of(problem: str, stretch: np.ndarray) -> float | None:
        shares = [share for step, share in seen[problem] if stretch[0] <= step <= stretch[-1]]
        return sum(shares) / len(shares) if shares else None

    cells = [[shade_of(problem, stretch) for stretch in stretches] for problem in picked]
    part = f" ({len(picked)} of {len(listed)})" if len(picked) < len(listed) else ""
    note = f"A row is a problem{part}, always solved ones on top, then learned, in between, forgotten, never solved. Shade: {shade}. "
    note += "Learned or forgotten means by half or more."
    names = [f"{problem} ({classes[problem]})" for problem in picked]
    columns = [str(stretch[-1]) for stretch in stretches]
    return [told, Cells("Problems over time", "step", "problems", columns, names, cells, note, labelled=False)]


def spread_out(items: list, most: int) -> list:
    """At most so many of them, the first and the last included."""
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(len(items), most)).astype(int))] if items else []


def _completions(samples: list[dict]) -> Iterator[Table | str]:
    """Of the two problems that were sampled most often, completions from the first to the last."""
    by_problem: dict[str, list[dict]] = {}
    for row in samples:
        by_problem.setdefault(str(row.get("problem")), []).append(row)
    often = sorted((seen for seen in by_problem.values() if len(seen) > 1), key=len, reverse=True)[:2]
    if not often and samples:
        yield "No problem was sampled twice."
    for seen in often:
        picked = spread_out(seen, 5)
        table = [[str(r["step"]), f"{r.get('total') or 0:g}", str(r.get("tokens")), _short(r.get("completion"))] for r in picked]
        yield f"{_short(seen[-1].get('prompt'))} (gold answer: {_short(seen[-1].get('answer'))})"
        yield Table(["step", "reward", "tokens", "completion"], table)


def _short(text: object) -> str:
    text = str(text)
    return text if len(text) <= 600 else f"{text[:580]} ... ({len(text)} characters)"
