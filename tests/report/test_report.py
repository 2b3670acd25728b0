import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import reported
from reported import default, sweep, write

from grpo_cli import report
from grpo_cli.report.arms import sweep_of
from grpo_cli.report.many import document
from grpo_cli.report.pages import Verdict


def claims(runs) -> list[str]:
    return [str(part) for part in document(runs, "t", {}).sections[0].parts if isinstance(part, Verdict)]


def arm(number: int, seeds=(1, 2, 3), **of_run):
    return [reported.run(f"{number}-{seed}", seed, arm=number, **of_run) for seed in seeds]


def test_a_planted_effect_is_told_with_its_evidence():
    (told,) = claims([*arm(0, changes={"kl.beta": 0.4}), *arm(1, changes={"kl.beta": 0.01}, effect=0.12)])
    assert re.match(r"beta 0\.01 beats 0\.4 by \d+\.\d points \[\d+\.\d, \d+\.\d\] at 1280 completions each, at equal tokens \d", told)
    assert told.endswith("(3 seeds, 300 problems).")


def test_no_effect_is_told_as_none():
    (told,) = claims([*arm(0), *arm(1, changes={"kl.beta": 0.01})])
    assert re.match(r"beta 0\.0\d+ and 0\.0\d+ can't be told apart: \d+\.\d points \[-\d+\.\d, \d+\.\d\]", told)


def test_a_process_figure_that_an_axis_moved_is_told():
    parts = document([*arm(0), *arm(1, changes={"group_size.samples_per_prompt": 2}, zero_std=0.6)], "t", {}).sections[0].parts
    assert any(re.match(r"G moved zero-std \(0\.(59|6)\d* at 2, 0\.\d+ at 8\)", part) for part in parts if isinstance(part, str))


def test_unequal_plans_are_refused_where_a_schedule_stretches_over_them():
    (told,) = claims([*arm(0), *arm(1, changes={"kl.beta": 0.4}, steps=40, effect=0.3)])
    assert "not compared: unequal budgets: 1280 and 2560 completions planned, and optimizer.schedule stretches over the plan" in told


def test_unequal_plans_without_a_schedule_are_compared_at_the_budget_that_both_have_spent():
    flat_rate = {"optimizer.schedule": "constant"}
    (told,) = claims([*arm(0, changes=flat_rate), *arm(1, changes=flat_rate | {"kl.beta": 0.4}, steps=30, effect=0.3)][:])
    assert "at 1280 completions each" in told and "the longest spent 1920 completions" in told


def test_a_sweep_over_steps_compares_its_other_axes_at_the_longest_plan():
    beta = {"kl.beta": 0.4}
    runs = [*arm(0), *arm(1, changes=beta), *arm(2, steps=40), *arm(3, changes=beta, steps=40, effect=0.3)]
    assert any(told.startswith("beta 0.4 beats 0.04") and "at 2560 completions each" in told for told in claims(runs))


def test_a_run_that_stopped_before_half_of_the_other_is_not_compared():
    (told,) = claims([*arm(0), *arm(1, changes={"kl.beta": 0.4}, reached=8, status="stopped")])
    assert "not compared: unequal budgets: 512 and 1280 completions spent" in told


def test_other_problems_and_other_judges_are_not_compared():
    assert "different held-out problems" in claims([*arm(0, solved=False), *arm(1, changes={"data.eval.limit": 7}, solved=False)])[0]
    assert "judged by different rules" in claims([*arm(0), *arm(1, changes={"reward.rules.accuracy.fn": "exact"})])[0]


def test_one_seed_claims_nothing_about_seeds():
    told = claims([*arm(0, seeds=(1,)), *arm(1, seeds=(1,), changes={"kl.beta": 0.4}, effect=0.2)])
    assert "beta 0.4 is ahead, in this seed, of 0.04 by" in told[0] and "one seed: the interval covers problems only" in told[0]


def test_without_outcomes_by_problem_the_interval_says_that_it_covers_seeds_only():
    parts = document([*arm(0, solved=False), *arm(1, changes={"kl.beta": 0.4}, solved=False)], "t", {}).sections[0].parts
    assert "(3 seeds)." in str(parts[0]) and any("cover seeds only" in str(part) for part in parts)


def test_an_axis_is_compared_with_the_others_equal_and_all_are_counted_by_holm():
    runs = []
    for number, (beta, G) in enumerate([(0, 4), (0, 8), (0.4, 4), (0.4, 8)]):
        runs += arm(number, changes={"kl.beta": beta, "group_size.samples_per_prompt": G}, effect=-0.15 * (beta > 0))
    found = document(runs, "t", {})
    beta, G = found.sections[0].parts[:2]
    assert beta.claim == "beta 0 beats 0.4" and re.search(r"by G 4: \d+\.\d, G 8: \d+\.\d", beta.evidence)
    assert "can't be told apart" in G.claim and "2 comparisons" in found.sections[0].parts[2]


def test_a_config_group_is_one_axis_and_an_override_in_it_another():
    preset = {"algorithm.clip_low": 0.1, "algorithm.dual_clip": 3.0}
    runs = []
    for number, (changes, option) in enumerate([({}, "grpo"), (preset, "mine"), ({"algorithm.clip_high": 0.3}, "grpo")]):
        for run in arm(number, changes=changes):
            run.summary["overrides"] = [f"algorithm={option}", f"seed={run.config['seed']}"]
            runs.append(run)
    found = sweep_of(runs)
    assert found.axes == {"algorithm": ["grpo", "mine"], "algorithm.clip_high": [0.2, 0.3]}
    assert [len(one.runs) for one in found.arms] == [3, 3, 3]


def test_keys_that_change_together_are_one_axis():
    runs = [*arm(0), *arm(1, changes={"optimizer.lr": 0.1, "optimizer.warmup_steps": 9})]
    assert sweep_of(runs).merged == {"optimizer.lr": ["optimizer.lr", "optimizer.warmup_steps"]}


def test_of_many_values_each_is_compared_with_the_best_and_eight_arms_have_a_colour():
    runs = [run for n in range(20) for run in arm(n, seeds=(1, 2), changes={"kl.beta": n / 100}, effect=0.02 * n, problems=40)]
    found = document(runs, "t", {})
    assert len([part for part in found.sections[0].parts if isinstance(part, Verdict)]) == 19
    curve = found.sections[3].parts[0]
    assert sum(not series.faint for series in curve.series) == 8 and len(curve.series) == 20


def test_null_controls_are_dashed_and_named():
    found = document([*arm(0, effect=0.2), *arm(1, changes={"reward.control": "random"})], "t", {})
    assert any("Null control (control random): 0.2" in str(part) for part in found.sections[0].parts)
    assert [series.dashed for series in found.sections[3].parts[0].series] == [False, True]


def test_long_curves_are_thinned_and_keep_their_mean():
    run = reported.run(steps=800, problems=10)
    reward = document([run], "t", {}).sections[4].parts[0].series[0]
    assert len(reward.x) == 160 and np.mean(reward.y) == pytest.approx(np.mean([row["reward/mean"] for row in run.metrics]), rel=1e-6)


# --- folders -----------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "path", "rect", "circle", "polyline", "polygon"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "rect", "circle", "polyline", "polygon"):
            assert self.open.pop() == tag


def read(folder):
    page = (folder / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert not tags.open and [tag for tag, _ in tags.seen].count("script") == 1  # the page's own: what a model wrote is text
    assert not any({"src", "href"} & attrs.keys() for _, attrs in tags.seen) and "http" not in page and "@import" not in page
    return page, (folder / "report.md").read_text(), json.loads((folder / "report.json").read_text())


def test_one_run_is_a_page_a_text_and_its_numbers(tmp_path):
    folder = write(reported.run(tmp_path / "one", changes={"kl.beta": 0.5}))
    shown = report.run([folder], None, default())
    page, text, numbers = read(folder)
    for word in (
        "Held-out accuracy rose",
        "75 % of completions gave a reward gradient",
        "kl.beta",
        "never solved",
        "&lt;script&gt;20&lt;/script&gt;",
    ):
        assert word in page, word
    assert "| kl.beta | 0.5 | 0.04 |" in text and "<script" not in text
    parts = {(s["title"], p.get("title")): p for s in numbers["sections"] for p in s["parts"]}
    ledger = parts["Curves", "Where the completions went"]
    assert [series["name"] for series in ledger["series"]] == ["trained", "all right"] and ledger["series"][0]["y"][0] == 0.75
    accuracy = parts["Curves", "Held-out accuracy"]["series"][0]
    assert accuracy["y"] == [json.loads(line)["eval/accuracy"] for line in (folder / "eval.jsonl").read_text().splitlines()]
    assert max(map(len, shown.splitlines()[:-1])) <= 80


def test_a_sweep_with_failed_running_and_damaged_jobs_is_reported_without_them(tmp_path):
    root = sweep(tmp_path / "s", [{"changes": {"kl.beta": beta}, "effect": -beta / 3} for beta in (0, 0.4)])
    write(reported.run(root / "6", 4, {"kl.beta": 0.4}, reached=3, status="failed", reason="SIGABRT in step 4"))
    write(reported.run(root / "7", 5, {"kl.beta": 0.4}, reached=3, status="running"))
    (root / "8").mkdir()
    (root / "8/summary.json").write_text('{"status": "failed", "reason": "no such data"}')
    with open(root / "0/metrics.jsonl", "a") as file:
        file.write('{"step": 21, "rew')
    (root / "1/eval_problems.jsonl").unlink()
    (root / "2/eval.jsonl").unlink()
    shown = report.run([root], None, default())
    page, text, _ = read(root)
    for word in (
        "SIGABRT in step 4",
        "no such data",
        "the last line of metrics.jsonl is cut off",
        "eval.jsonl is missing",
        "9 runs, 5 finished",
    ):
        assert word in page and word in text, word
    assert "beta 0 beats 0.4" in " ".join(shown.split()) and "seed 3, 4, 5 left out" in " ".join(shown.split())
    assert max(map(len, shown.splitlines()[:-1])) <= 80


def test_a_run_that_has_just_begun_is_reported_as_far_as_it_goes(tmp_path):
    folder = write(reported.run(tmp_path / "new", reached=0, status="running"))
    assert "running" in report.run([folder], None, default())
    assert "metrics.jsonl is missing" in read(folder)[0]
    assert "nothing written for" not in read(folder)[0]
    for file in folder.glob("*.json*"):
        os.utime(file, (1e9, 1e9))
    assert "killed?" in report.run([folder], None, default())


def test_runs_below_a_folder_are_listed_with_what_sets_them_apart(tmp_path):
    sweep(tmp_path / "grpo/sweeps/abc", [{"changes": {"kl.beta": beta}} for beta in (0, 0.4)], seeds=(1,), problems=10)
    write(reported.run(tmp_path / "grpo/one", problems=10, status="interrupted", reason="SIGTERM after step 20"))
    shown = report.run([tmp_path], None, default())
    lines = [line.split() for line in shown.splitlines() if line.startswith("grpo/")]
    assert [line[:2] for line in lines] == [
        ["grpo/one", "interrupted"],
        ["grpo/sweeps/abc/0", "finished"],
        ["grpo/sweeps/abc/1", "finished"],
    ]
    assert lines[1][3] == "kl.beta=0" and lines[2][3] == "kl.beta=0.4"
    assert "SIGTERM after step 20" in read(tmp_path)[0] and "MiB" in shown


def test_several_folders_are_compared_and_saved_where_asked(tmp_path):
    root = sweep(tmp_path / "s", [{}], problems=40)
    folders = [root, write(reported.run(tmp_path / "control", 1, {"reward.control": "random"}, arm=1, problems=40))]
    report.run(folders, tmp_path / "out/here", default())
    assert "Null control" in read(tmp_path / "out/here")[0] and not (root / "report.html").exists()


def test_what_is_no_run_gets_one_clear_message(tmp_path):
    with pytest.raises(ValueError, match="is no folder: name a run folder, a sweep folder, or one above them"):
        report.run([tmp_path / "none"], None, {})
    (tmp_path / "config.yaml").write_text("defaults: [base]\nlr: 1\n")
    with pytest.raises(ValueError, match="holds no run of grpo-train"):
        report.run([tmp_path], None, {})
    assert not (tmp_path / "report.html").exists()


def test_the_command_needs_no_torch_and_reads_its_arguments(tmp_path):
    folder = write(reported.run(tmp_path / "one", problems=10))
    code = "import sys; from grpo_cli import cli\ntry: cli.report()\nfinally: assert 'torch' not in sys.modules"
    words = {(): "takes one or more folders", ("--fast",): "--fast is not a flag", ("--help",): "Examples:", (str(folder),): "Run one"}
    for argv, word in words.items():
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
        assert word in done.stdout + done.stderr and "Traceback" not in done.stderr
