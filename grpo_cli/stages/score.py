"""Judge the completions of a file by reward rules: a table for the eyes, one JSON object per row for programs. Needs no model."""

import json
import math
import os
import time
from pathlib import Path

from grpo_cli.config import ScoreRun
from grpo_cli.data import read_rows
from grpo_cli.records import Ended, Problem, Sample, frozen
from grpo_cli.rewards import Rules, weigh
from grpo_cli.runfolder import write_text
from grpo_cli.tracking.scores import Progress, print_scores

_CHUNK = 256
_OWN = ("id", "completion", "answer", "gold", "prompt", "tokens", "ended")


def run(cfg: ScoreRun) -> list[dict]:
    """The rows that are saved: {"id", "total", "rules": {name: score, null where it does not apply}, "errors": {name: what happened}}."""
    rows = read_rows(cfg.completions, key="completions")
    samples = [_sample(row, f"{cfg.completions} row {number}", number) for number, row in enumerate(rows, 1)]
    _check_save(cfg)
    scored, seconds = [], []
    started = time.monotonic()
    with Rules(cfg.reward, cfg.device) as rules, Progress("scoring", len(samples)) as progress:
        for start in range(0, len(samples), _CHUNK):
            chunk = samples[start : start + _CHUNK]
            for sample, verdicts in zip(chunk, rules.judge(chunk), strict=True):
                weighed = weigh(cfg.reward.rules, sample, verdicts)
                values = {name: None if math.isnan(value) else value for name, value in weighed.values.items()}
                scored.append({"id": sample.problem.id, "total": weighed.total, "rules": values, "errors": weighed.errors})
            seconds += rules.pool.seconds_B
            progress.advance(len(chunk))
    if cfg.save:
        write_text(Path(cfg.save).expanduser(), "".join(json.dumps(row) + "\n" for row in scored))
    print_scores(scored, seconds, [sample.text for sample in samples], cfg.show, time.monotonic() - started, cfg.save)
    return scored


def _check_save(cfg: ScoreRun) -> None:
    """Before anything is scored: a place for the scores that is neither absent nor taken by something else."""
    if cfg.save is None:
        return
    target = Path(cfg.save).expanduser().absolute()
    if not os.access(target.parent, os.W_OK):
        raise ValueError(f"save={cfg.save}: there is no such folder that can be written: make it, or try save=scores.jsonl")
    if target.is_dir() or target.suffix == ".gz":
        raise ValueError(f"save={cfg.save} must name a plain file: try save=scores.jsonl")
    if target.resolve() == Path(cfg.completions).expanduser().resolve():
        raise ValueError(f"save={cfg.save} would replace the completions: try save=scores.jsonl")


def _sample(row: dict, where: str, number: int) -> Sample:
    text = row.get("completion")
    if not isinstance(text, str):
        raise ValueError(f"{where}: completion must be a text, not {text!r} (it has the fields: {', '.join(map(str, row)) or 'none'})")
    gold = row.get("answer", row.get("gold", ""))
    ended, tokens = row.get("ended", Ended.eos.name), row.get("tokens", len(text.split()))
    if not isinstance(ended, str) or ended not in Ended.__members__:
        raise ValueError(f"{where}: ended is {' or '.join(Ended.__members__)}, not {ended!r}")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise ValueError(f"{where}: tokens must be a whole number, not {tokens!r}; without it the words of the completion are counted")
    fields = frozen({key: value for key, value in row.items() if key not in _OWN})
    prompt = row.get("prompt", "")
    problem = Problem(str(row.get("id", number)), prompt, "" if gold is None else str(gold), fields)
    return Sample(problem, prompt if isinstance(prompt, str) else "", text, tokens, Ended[ended])
