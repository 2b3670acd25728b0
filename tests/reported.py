"""Synthetic runs for the report: accuracy by seed and problem from a model with known effects, as records or as folders."""

import json
from functools import cache
from pathlib import Path

import numpy as np

from grpo_cli import runfolder
from grpo_cli.cli import TRAIN
from grpo_cli.compose import Composer, convert
from grpo_cli.report.read import Run, flat

PARTS = ("trained", "all_right", "all_wrong", "tied", "truncated", "filtered", "unscored")
SLOPE = 0.13
"""Points of accuracy for a point of log-odds, with the spread of problems below."""


@cache
def default() -> dict:
    with Composer(TRAIN, None, None) as composer:
        return runfolder.values(convert(composer.compose([]), []))


def run(
    folder: str | Path = "run",
    seed: int = 1,
    changes: dict | None = None,
    effect: float = 0.0,
    arm: int = 0,
    world: int = 0,
    seed_sd: float = 0.013,
    problems: int = 300,
    samples: int = 4,
    steps: int = 20,
    reached: int | None = None,
    tokens: float = 20.0,
    kl: float = 1.0,
    zero_std: float = 0.2,
    solved: bool = True,
    status: str = "finished",
    reason: str | None = None,
) -> Run:
    """A run whose final accuracy differs from that of another arm by `effect` (about), by its seed, and by arm and problem."""
    config = flat(default()) | {"steps": steps, "seed": seed} | (changes or {})
    reached = steps if reached is None else reached
    B = config["group_size.completions_per_step"]
    difficulty_P = np.random.default_rng([world, 0]).normal(-1.5, 1.8, problems)
    taste_P = np.random.default_rng([world, 1, arm]).normal(0, 0.4, problems)
    rng = np.random.default_rng([world, 2, arm, seed])
    shift = (effect + rng.normal(0, seed_sd)) / SLOPE
    metrics, evals, shares = [], [], {}
    for step in range(reached + 1):
        if step:
            metrics.append(_metrics(step, rng, B, tokens, kl * step / steps, zero_std))
        if step in (0, steps // 2, steps) or step == reached:
            done = step / steps
            chance_P = 1 / (1 + np.exp(-(difficulty_P + done * (1.3 + taste_P + shift) + rng.normal(0, 0.3, problems))))
            right_P = rng.binomial(samples, chance_P)
            error = float((right_P / samples).std(ddof=1) / problems**0.5) if problems > 1 else None
            row = {"eval/accuracy": float(right_P.mean() / samples), "eval/accuracy_se": error, "eval/accuracy_n": problems * samples}
            evals.append({"step": step, **row, "eval/accuracy_greedy": row["eval/accuracy"], "eval/accuracy_greedy_n": problems})
            shares[step] = {f"p{i}": right / samples for i, right in enumerate(right_P.tolist())}
    summary = {"status": status, "reason": reason, "started": "2026-01-31T12:00:00", "seed": seed}
    summary["overrides"] = [f"{key}={value}" for key, value in ({"seed": seed} | (changes or {})).items()]
    summary["evaluation"] = {"best": max(evals, key=lambda row: row["eval/accuracy"])}
    return Run(Path(folder), config, summary, metrics, evals, shares if solved else {})


def _metrics(step: int, rng: np.random.Generator, B: int, tokens: float, kl: float, zero_std: float) -> dict:
    row = {
        "step": step,
        "reward/mean": 0.3 + 0.01 * step,
        "reward/group_std": 0.4,
        "kl/sequence": kl * float(rng.uniform(0.9, 1.1)),
        "kl/beta": 0.04,
    }
    row |= {"group/frac_zero_std": float(np.clip(rng.normal(zero_std, 0.05), 0, 1)), "completion/tokens": tokens, "policy/entropy": 0.2}
    row |= {"completion/truncated_frac": 0.0, "time/step_s": 0.5, "speed/tokens_per_s": B * tokens / 0.5}
    for part in PARTS:
        share = {"trained": 0.75, "all_right": 0.25}.get(part, 0)
        row |= {f"ledger/completions/{part}": share * B * step, f"ledger/tokens/{part}": share * B * step * tokens}
    return row


def write(one: Run) -> Path:
    """The run as files."""
    one.folder.mkdir(parents=True)
    nested: dict = {"defaults": ["_grpo", "_self_"]}
    for key, value in one.config.items():
        place = nested
        *outer, last = key.split(".")
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = value
    (one.folder / "config.yaml").write_text(json.dumps(nested))  # YAML too
    (one.folder / "summary.json").write_text(json.dumps(one.summary))
    steps = range(1, len(one.metrics) + 1)
    verdicts = ("all_wrong", "mixed", "all_right")
    groups = [{"step": s, "problem": f"t{p}", "verdict": verdicts[min(2, p * s // 20)]} for s in steps for p in range(4)]
    texts = [
        {"step": s, "problem": "t1", "prompt": "1+1=", "completion": f"<script>{s}</script>", "answer": "2", "total": 1.0} for s in steps
    ]
    solved = [{"step": s, "samples": 4, "sampled": {i: round(4 * share) for i, share in of.items()}} for s, of in one.solved.items()]
    for name, content in (("metrics", one.metrics), ("eval", one.evals), ("groups", groups), ("samples", texts), ("eval_problems", solved)):
        if content:
            (one.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return one.folder


def sweep(root: Path, arms: list[dict], seeds: tuple[int, ...] = (1, 2, 3), **common) -> Path:
    """A sweep folder: every arm (arguments of `run`) with every seed."""
    jobs = [(number, arm, seed) for number, arm in enumerate(arms) for seed in seeds]
    for job, (number, arm, seed) in enumerate(jobs):
        write(run(root / str(job), seed, **{"arm": number, **common, **arm}))
    return root
