"""The console scripts. Errors run as the installed script, runs in this process with a stage that trains nothing."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from grpo_cli import cli, runfolder
from grpo_cli.runfolder import RunFolder
from grpo_cli.runtime import hydra_override
from grpo_cli.tracking import jobs

SCRIPTS = Path(sys.executable).parent


def script(name, *argv, cwd, **variables):
    return subprocess.run(
        [SCRIPTS / name, *argv], cwd=cwd, capture_output=True, text=True, env=os.environ | variables, stdin=subprocess.DEVNULL, timeout=60
    )


class Stage(types.ModuleType):
    """Stands in for a stage. kl.beta says how it ends: 2, 3, 5 and 6 fail, 4 is interrupted."""

    def __init__(self):
        super().__init__("stage")
        self.calls = []

    def run(self, cfg, run_dir, overrides, sweep=None, name=None):
        self.calls.append((str(run_dir), overrides, sweep, cfg.resume))
        with RunFolder(run_dir, cfg, overrides, resume=bool(cfg.resume)) as folder:
            if cfg.kl.beta == 2:
                raise ValueError("this beta is the user's mistake")
            if cfg.kl.beta == 3:
                raise KeyError("ours")
            if cfg.kl.beta == 5:
                raise SystemExit(0)
            if cfg.kl.beta == 6:
                raise GeneratorExit
            if cfg.kl.beta == 4:
                folder.update(status="interrupted", reason="SIGTERM")
                return folder.summary
            evaluation = {"first": {"eval/accuracy": 0.25}, "last": {"eval/accuracy": 0.9}}
            folder.update(status="finished", reason="all steps are done", evaluation=evaluation)
            return folder.summary


@pytest.fixture
def stage(monkeypatch, tmp_path):
    stage = Stage()
    monkeypatch.setitem(sys.modules, "grpo_cli.stages.grpo", stage)
    monkeypatch.setattr(sys, "argv", ["grpo-train"])
    monkeypatch.chdir(tmp_path)
    return stage


def cli_config(*overrides):
    with cli.Composer(cli.TRAIN, None, None) as composer:
        return cli.convert(composer.compose(list(overrides)), list(overrides))


def run(*argv, command=cli.TRAIN):
    """The exit status of grpo-train."""
    try:
        return cli._guarded(cli._hydra_command, command, list(argv))
    except SystemExit as ended:
        return ended.code


# --- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["kl.betta=0.1"], "kl.betta is unknown: did you mean kl.beta (or kl.min_beta)? Try kl.beta=0.1"),
        (["+kl.betta=0.1"], "kl.betta is unknown: did you mean kl.beta (or kl.min_beta)? Try kl.beta=0.1"),
        (["group_size=g3"], "there is no option g3: group_size has g2, g4, g8, g16, g32, g64: try group_size=g2 or group_size=g4"),
        (["modle=tiny"], "modle is unknown: did you mean model? Try model=tiny"),
        (["kl.beta=abc"], "a number is expected: try kl.beta=0.1"),
        (["group_size.samples_per_prompt=1"], "must be 2 or above, not 1: a group of one has no advantage: try group_size=g8"),
        (["model=hf"], "model.path is empty: try model.path=FOLDER"),
        (["-m", "kl.beta=0,-1"], "job 1 (kl.beta=-1): kl.beta must be 0 or above, not -1.0: try kl.beta=0"),
        (["--nonsense"], "--nonsense is not a flag: see grpo-train --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_quick_message_before_anything_exists(tmp_path, argv, words):
    started = time.perf_counter()
    ended = script("grpo-train", *argv, cwd=tmp_path)
    assert time.perf_counter() - started < 5  # 0.35 s alone; torch alone takes longer than this on a busy machine
    assert ended.returncode != 0
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1 and words in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_neither_errors_nor_help_import_torch(tmp_path):
    code = """
import sys
from grpo_cli import cli
for argv in (["--help"], ["kl.betta=1"], ["-m", "kl.beta=0,-1"], ["--cfg", "job"]):
    sys.argv = ["grpo-train", *argv]
    try:
        cli.train()
    except SystemExit:
        pass
print(sorted({"torch", "transformers", "peft", "wandb", "rich"} & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--multirum"], "--multirum is not a flag: did you mean --multirun?"),
        (["--kl.beta=1"], "--kl.beta=1 is not a flag: try kl.beta=1"),
        (["-m", "--cfg", "job"], "--multirun and --cfg do not go together"),
        (["--resolve"], "try --cfg job --resolve"),
        (["--cfg", "job", "kl.betta=1"], "Try kl.beta=1"),
        (["-cn", "nope"], "there is no config nope"),
        (["-cn", "sft"], "sft is not a config of grpo-train"),
        (["-cd", "nowhere", "-cn", "x"], "-cd nowhere: there is no such folder"),
        (["resume=nowhere"], "not a run folder: nowhere has no config.yaml"),
        (["-m", "resume=nowhere", "kl.beta=0,1"], "a sweep continues by itself"),
        (["-m", "kl=constant,linaer"], "job 1 (kl=linaer): kl=linaer: there is no option linaer"),
        (["-m", "kl.betta=0,1"], "job 0 (kl.betta=0): kl.betta is unknown"),
        (["-m", "kl.beta=interval(0,1)"], "list the values instead"),
        (["-m", "resume=nowhere,auto"], "job 0 (resume=nowhere): resume=nowhere continues one run, and a sweep continues by itself"),
        (["-m", "~reward.rules.format", "kl.beta=0,1"], "a sweep cannot drop a key"),
        (["-m", "seed=glob(*)"], "seed=glob(*) stands for no value at all, so the sweep has no job: list the values"),
        (["-m", "kl.beta=0,1", "seed=range(1,1)"], "seed=range(1,1) stands for no value at all"),
        (["-m", "seed=range(1,5,0)"], "must not be zero: list the values instead"),
        (["-m", "seed=1,2", "hydra.run.dir=a"], "hydra.run.dir=a is not read by a sweep: try hydra.sweep.dir=FOLDER"),
        (["-m", "seed=1,2", "hydra.sweep.subdir=same"], "job 1 (seed=2): it would share the folder"),
        (["-m", "seed=1,2", "hydra.sweep.subdir=${kl.beta}"], "/0.04 with job 0: drop hydra.sweep.subdir"),
        (["-m", "seed=1,2", "hydra.sweep.dir=s/${seed}"], "hydra.sweep.dir differs between the jobs (s/1, s/2)"),
        (["-m", "seed=1,2", "hydra.sweep.dir="], "hydra.sweep.dir is empty: try hydra.sweep.dir=FOLDER"),
        (["-m", "seed=1,2", "hydra.sweep.subdir=${nope}"], "hydra.sweep.subdir: Interpolation key 'nope' not found"),
        (["hydra.sweep.dir=s"], "hydra.sweep.dir=s is not read without -m: add -m, or choose the folder with hydra.run.dir=FOLDER"),
        (["hydra.run.dir="], "hydra.run.dir is empty: try hydra.run.dir=FOLDER"),
        (["hydra.run.dir=???"], "hydra.run.dir: Missing mandatory value: hydra.run.dir: try hydra.run.dir=FOLDER"),
        (["hydra.run.dir=${nope}"], "hydra.run.dir: Interpolation key 'nope' not found: try hydra.run.dir=FOLDER"),
        (["hydra.run.dir='\\${x}'"], "hydra.run.dir=${x}: Hydra cannot work in a folder whose path holds a literal ${: choose another one"),
        (["resume=ünï"], """try "resume='ünï'\""""),
        (["-m", "+hydra.sweeper.params={kl.beta: 1}"], "hydra.sweeper.params is null here"),
        (["hydra.run.dir=file/x"], "cannot make the folder file/x: Not a directory: choose another one with hydra.run.dir=FOLDER"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_is_refused(stage, capsys, argv, words):
    Path("file").write_text("")
    assert run(*argv) == 1
    assert words in capsys.readouterr().err
    assert stage.calls == []
    assert [path.name for path in Path().iterdir()] == ["file"]


# --- help and Hydra's own services -------------------------------------------------------------------------------------


def test_help_lists_every_group_with_its_options_and_every_key_of_the_run(tmp_path):
    shown = script("grpo-train", "--help", cwd=tmp_path).stdout
    assert re.search(r"group_size +g8, g2, g4, g16, g32, g64\n", shown)
    assert re.search(r"model +tiny, hf, ", shown)
    assert {"steps=100", "seed=1", "eval_every=20", "resume=null", "stop.metric=eval/accuracy"} <= set(shown.split())
    assert len(re.findall(r"^  grpo-train", shown, re.MULTILINE)) == 3


@pytest.mark.parametrize("name", ["grpo-eval", "grpo-sft"])
def test_the_other_scripts_have_help_with_examples(tmp_path, name):
    ended = script(name, "--help", cwd=tmp_path)
    assert ended.returncode == 0 and f"  {name} " in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_hydras_own_help_info_config_and_completion_work(tmp_path):
    assert "== Flags ==" in script("grpo-train", "--hydra-help", cwd=tmp_path).stdout
    assert "pkg://grpo_cli.conf" in script("grpo-train", "--info", "searchpath", cwd=tmp_path).stdout
    assert "beta: 7.0" in script("grpo-train", "kl.beta=7", "--cfg", "job", "model=hf", "--resolve", "-p", "kl", cwd=tmp_path).stdout
    words = script("grpo-train", "-sc", "query=bash", cwd=tmp_path, COMP_LINE="grpo-train kl=c", COMP_POINT="16").stdout
    assert words.split() == ["kl=constant", "kl=cosine"]
    assert list(tmp_path.iterdir()) == []


# --- single runs -------------------------------------------------------------------------------------------------------


def test_a_run_gets_a_folder_named_after_config_and_time(stage):
    assert run("kl.beta=1", "seed=7") == 0
    ((folder, overrides, sweep, resume),) = stage.calls
    assert re.fullmatch(r"outputs/grpo/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folder)
    assert (overrides, sweep, resume) == (["kl.beta=1", "seed=7"], None, None)
    assert sorted(path.name for path in Path(folder).iterdir()) == [".lock", "config.yaml", "summary.json"]


def test_runs_started_in_the_same_second_get_different_folders(stage):
    folder = cli._claim(Path("outputs/grpo/then"))
    assert [cli._claim(folder).name for _ in range(2)] == ["then-2", "then-3"]


def test_two_runs_in_one_given_folder_are_refused(stage, capsys):
    assert run("hydra.run.dir=a") == 0
    before = Path("a/summary.json").read_text()
    assert run("hydra.run.dir=a") == 1
    assert "a already holds a run: choose another folder" in capsys.readouterr().err
    assert Path("a/summary.json").read_text() == before and len(stage.calls) == 1


def test_flags_may_stand_among_overrides(stage):
    Path("mine").mkdir()
    Path("mine/long.yaml").write_text("defaults: [grpo, override group_size: g4, _self_]\nsteps: 7\n")
    assert run("kl.beta=1", "-cd", "mine", "seed=3", "-cn", "long") == 0
    values = runfolder.load(stage.calls[0][0])
    assert stage.calls[0][0].startswith("outputs/long/")
    assert (values["steps"], values["group_size"]["samples_per_prompt"], values["kl"]["beta"], values["seed"]) == (7, 4, 1.0, 3)


def test_a_runs_own_config_repeats_it(stage):
    assert run("hydra.run.dir=a", "kl=linear", "~reward.rules.format", "model.lora=null") == 0
    assert run("-cd", "a", "-cn", "config", "hydra.run.dir=b") == 0
    assert runfolder.load("a") == runfolder.load("b")


@pytest.mark.parametrize(
    ("beta", "shown"), [(2, "error: this beta is the user's mistake\n"), (3, "error: KeyError: 'ours'\nThe traceback is in a/error.log\n")]
)
def test_a_failing_run_says_one_thing_and_keeps_the_traceback(stage, capsys, beta, shown):
    assert run("hydra.run.dir=a", f"kl.beta={beta}") == 1
    assert capsys.readouterr().err == shown
    assert runfolder.summary(Path("a"))["status"] == "failed"
    assert "in run\n" in Path("a/error.log").read_text()


@pytest.mark.parametrize(("beta", "error"), [(5, "SystemExit: 0"), (6, "GeneratorExit: ")])
def test_an_exit_out_of_a_run_does_not_pass_for_success(stage, capsys, beta, error):
    assert run("hydra.run.dir=a", f"kl.beta={beta}") == 1
    assert capsys.readouterr().err == f"error: {error}\nThe traceback is in a/error.log\n"
    assert runfolder.summary(Path("a"))["status"] == "failed"
    assert run("-m", f"kl.beta={beta},1", "hydra.sweep.dir=s") == 1
    assert capsys.readouterr().err == f"error: job 0 (kl.beta={beta}): {error}\nThe traceback is in s/0/error.log\n"
    assert [runfolder.summary(Path("s") / str(n))["status"] for n in range(2)] == ["failed", "finished"]


FOLDERS = ["my runs", "ünï", "a=b", "a,b", "a'b", 'a"b', "a\\b", "a\\", "a\\'", "~x", "$x", "true", "null", "0", "1_0", "#a", "{a}", "-a"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_any_name_can_be_given_continued_and_measured(stage, monkeypatch, name):
    (given,), (resumed,), (measured,) = (shlex.split(hydra_override(key, name)) for key in ("hydra.run.dir", "resume", "run"))
    assert run(given, "kl.beta=4") == 130
    assert run(resumed, "steps=9") == 130
    assert [call[0] for call in stage.calls] == [name, name]
    assert [path.name for path in Path().iterdir()] == [name]
    module = types.ModuleType("evaluation")
    module.run = lambda cfg, folder, checkpoint, overrides: {"folder": stage.calls.append(str(folder))}
    monkeypatch.setitem(sys.modules, "grpo_cli.stages.eval", module)
    assert evaluate(measured) == 0 and evaluate(f"run={name}") == (1 if name[0] in "'\"" else 0)
    assert stage.calls[2] == name


@pytest.mark.parametrize("name", FOLDERS)
def test_a_sweep_goes_to_a_folder_of_any_name(stage, name):
    (given,) = shlex.split(hydra_override("hydra.sweep.dir", name))
    assert run("-m", "kl.beta=0.5,1", given) == 0
    assert [call[0] for call in stage.calls] == [f"{name}/0", f"{name}/1"]


def test_a_quoted_tilde_is_the_home_folder(stage, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert run("hydra.run.dir='~/a'", "kl.beta=4") == 130
    assert run("resume='~/a'", "hydra.run.dir='~/a'") == 130
    assert run("-m", "kl.beta=0.5,1", "hydra.sweep.dir='~/s'") == 0
    assert [call[0] for call in stage.calls] == ["home/a", "home/a", "home/s/0", "home/s/1"]


@pytest.mark.parametrize("how", ["debug", "HYDRA_FULL_ERROR"])
def test_the_traceback_is_shown_when_asked_for(stage, capsys, monkeypatch, how):
    if how == "HYDRA_FULL_ERROR":
        monkeypatch.setenv(how, "1")
    assert run("kl.beta=2", f"debug={str(how == 'debug').lower()}") == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_stage_that_cannot_even_be_loaded_is_recorded(stage, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "grpo_cli.stages.grpo", None)  # import then raises ModuleNotFoundError
    assert run("hydra.run.dir=a") == 1
    assert runfolder.summary(Path("a"))["status"] == "failed"
    assert "The traceback is in a/error.log" in capsys.readouterr().err


# --- resuming ----------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_exits_130_and_resume_auto_finds_it(stage):
    assert run("kl.beta=4") == 130
    assert run("kl.beta=1") == 0
    assert run("kl.beta=4", "resume=auto", "steps=9") == 130
    first, _, again = stage.calls
    assert again[0] == first[0] and again[3] == "auto"


def test_resume_auto_without_an_unfinished_run_starts_afresh(stage):
    assert run("kl.beta=1") == 0
    assert run("kl.beta=1", "resume=auto") == 0
    assert stage.calls[0][0] != stage.calls[1][0]


def test_resume_auto_stays_in_a_given_folder(stage):
    assert run("hydra.run.dir=a", "kl.beta=4", "resume=auto") == 130
    assert run("hydra.run.dir=a", "kl.beta=4", "resume=auto") == 130
    assert [call[0] for call in stage.calls] == ["a", "a"]


def test_resume_folder_repeats_its_config_with_overrides_on_top(stage):
    assert run("hydra.run.dir=a", "kl=linear", "kl.beta=4", "~reward.rules.format") == 130
    assert run("resume=a", "steps=9") == 130
    assert stage.calls[1] == ("a", ["resume=a", "steps=9"], None, "a")
    values = runfolder.load("a")
    assert (values["steps"], values["kl"]["schedule"], list(values["reward"]["rules"])) == (9, "linear", ["accuracy"])


def test_resume_folder_with_a_recipe_named_compares_the_two(stage, capsys):
    Path("mine").mkdir()
    Path("mine/long.yaml").write_text("defaults: [grpo, _self_]\nkl: {beta: 4}\n")
    assert run("-cd", "mine", "-cn", "long", "hydra.run.dir=a") == 130
    assert run("-cd", "mine", "-cn", "long", "resume=a", "steps=9") == 130
    assert [call[0] for call in stage.calls] == ["a", "a"]
    Path("mine/long.yaml").write_text("defaults: [grpo, _self_]\nkl: {beta: 5}\n")
    assert run("-cd", "mine", "-cn", "long", "resume=a") == 1
    assert "a holds a run of another config: kl.beta was 4.0, is now 5.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("kl.beta=1", "a holds a run of another config: kl.beta was 4.0, is now 1.0"),
        ("algorithm.clip_low=0.1", "algorithm.clip_low was 0.2, is now 0.1"),
        ("model=hf", "model=hf cannot be changed here: resume=a uses that run's own values"),
        ("hydra.run.dir=b", "drop hydra.run.dir"),
    ],
)
def test_resuming_as_something_else_is_refused_and_damages_nothing(stage, capsys, override, words):
    run("hydra.run.dir=a", "kl.beta=4")
    before = {path.name: path.read_bytes() for path in Path("a").iterdir()}
    assert run("resume=a", override) == 1
    assert words in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in Path("a").iterdir()} == before
    assert [path.name for path in Path().iterdir()] == ["a"]


# --- sweeps ------------------------------------------------------------------------------------------------------------


def test_a_failing_job_does_not_stop_a_sweep(stage, capsys):
    assert run("-m", "kl.beta=1,2,0.5", "group_size=g4") == 1
    shown = capsys.readouterr()
    assert shown.err == "error: job 1 (kl.beta=2): this beta is the user's mistake\n"
    (sweep,) = Path("outputs/grpo/sweeps").iterdir()
    assert [call[0] for call in stage.calls] == [f"{sweep}/{n}" for n in range(3)]
    assert {call[2] for call in stage.calls} == {sweep.name}
    assert [runfolder.summary(sweep / str(n))["status"] for n in range(3)] == ["finished", "failed", "finished"]
    assert (sweep / "1" / "error.log").exists()
    lines = [re.split(r"  +", line) for line in shown.out.splitlines()[-5:-1]]
    assert lines[0] == ["job", "overrides", "status", "accuracy", "folder"]
    assert lines[2] == ["1", "kl.beta=2", "failed (this beta is the user's mistake)", "-", "1"]
    assert lines[3] == ["2", "kl.beta=0.5", "finished", "0.25 -> 0.90", "2"]


def test_the_same_command_is_the_same_sweep_and_skips_what_is_done(stage, capsys):
    assert run("-m", "kl.beta=1,4,0.5") == 130
    assert [call[1] for call in stage.calls] == [["kl.beta=1"], ["kl.beta=4"]]
    assert re.search(r"2 +kl.beta=0.5 +not started", capsys.readouterr().out)
    stage.calls.clear()
    assert run("-m", "kl.beta=1,4,0.5", "resume=auto", "debug=true") == 130
    assert [(call[1][0], call[3]) for call in stage.calls] == [("kl.beta=4", "auto")]
    assert re.search(r"job 0 .*finished already in outputs/grpo/sweeps/\w+/0, skipped", capsys.readouterr().out)
    assert len(list(Path("outputs/grpo/sweeps").iterdir())) == 1


def test_other_jobs_in_a_sweeps_folder_are_refused_before_the_first_starts(stage, capsys):
    assert run("-m", "kl.beta=1,0.5", "hydra.sweep.dir=s") == 0
    stage.calls.clear()
    assert run("-m", "kl.beta=1,0.25", "hydra.sweep.dir=s") == 1
    assert "job 1 (kl.beta=0.25): s/1 holds a run of another config: kl.beta was 0.5, is now 0.25" in capsys.readouterr().err
    assert stage.calls == []


def test_a_sweep_whose_job_fails_before_it_has_its_folder_fails_though_the_folder_says_finished(stage, monkeypatch, capsys):
    assert run("-m", "kl.beta=1,0.5", "hydra.sweep.dir=s", "steps=2") == 0
    with RunFolder(Path("s/1"), cli_config("kl.beta=0.5", "steps=2"), [], resume=True) as held:
        held.update(status="finished")
        assert run("-m", "kl.beta=1,0.5", "hydra.sweep.dir=s", "steps=3") == 1
    assert "s/1 is in use by process" in capsys.readouterr().err
    assert [runfolder.summary(Path("s") / str(n))["status"] for n in range(2)] == ["finished", "finished"]


def test_jobs_named_by_their_overrides_are_found_where_they_went(stage, capsys):
    assert run("-m", "kl.beta=1,0.5", "seed=3", "hydra.sweep.dir=s", "hydra.sweep.subdir='${hydra:job.override_dirname}'") == 0
    assert [call[0] for call in stage.calls] == ["s/kl.beta=1", "s/kl.beta=0.5"]
    assert capsys.readouterr().out.count("finished") == 2


def test_a_sweep_written_in_a_recipe_is_checked_and_run(stage, capsys):
    Path("mine").mkdir()
    recipe = "defaults: [grpo, _self_]\nhydra: {mode: MULTIRUN, sweeper: {params: {kl.beta: '1,-1'}}}\n"
    Path("mine/sweep.yaml").write_text(recipe)
    assert run("-cd", "mine", "-cn", "sweep") == 1
    assert "job 1 (kl.beta=-1): kl.beta must be 0 or above" in capsys.readouterr().err
    Path("mine/sweep.yaml").write_text(recipe.replace("-1", "0.5"))
    assert run("-cd", "mine", "-cn", "sweep") == 0
    assert [call[1] for call in stage.calls] == [["kl.beta=1"], ["kl.beta=0.5"]]


def test_the_table_reads_only_the_folders(tmp_path):
    runfolder.write_json(tmp_path / "summary.json", {"status": "failed", "reason": "x" * 80})
    assert jobs.status(tmp_path) == f"failed ({'x' * 57}...)"
    assert jobs.status(tmp_path / "none") == "not started"


# --- grpo-eval and grpo-sft --------------------------------------------------------------------------------------------


def evaluate(*argv):
    return cli._guarded(cli._evaluate, cli.EVAL, list(argv))


@pytest.fixture
def evaluation(stage, monkeypatch):
    assert run("hydra.run.dir=a", "kl.beta=1", "resume=auto") == 0
    module = types.ModuleType("evaluation")
    module.calls = []

    def measure(cfg, folder, checkpoint, overrides):
        module.calls.append((cfg, folder, checkpoint))
        if checkpoint == "7":
            raise ValueError("there is no step 7")
        return {"checkpoint": "step_000100", "eval/accuracy": 0.5, "eval/accuracy_se": 0.25, "eval/accuracy_n": 4}

    module.run = measure
    monkeypatch.setitem(sys.modules, "grpo_cli.stages.eval", module)
    return module


def test_grpo_eval_takes_the_runs_config_with_overrides(evaluation, capsys):
    free = ["device=cpu", "model.dtype=bfloat16", "model.micro_batch_tokens=99"]
    assert evaluate("run=a", "evaluation.samples_per_problem=8", "data.eval.limit=500", "checkpoint=last", *free) == 0
    ((cfg, folder, checkpoint),) = evaluation.calls
    assert (cfg.model.dtype.name, cfg.model.micro_batch_tokens) == ("bfloat16", 99)
    assert (folder, checkpoint) == (Path("a"), "last")
    assert (cfg.kl.beta, cfg.evaluation.samples_per_problem, cfg.data.eval.limit, cfg.device) == (1.0, 8, 500, "cpu")
    assert re.search(r"eval/accuracy +0.5000 \+- 0.2500  \(n=4\)", capsys.readouterr().out)


def test_grpo_eval_measures_the_best_checkpoint_by_default(evaluation):
    assert evaluate("run=a") == 0
    assert evaluation.calls[0][2] == "best"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "run is not set: try grpo-eval run=FOLDER"),
        (["run=nowhere"], "not a run folder: nowhere has no config.yaml"),
        (["run=a", "data=gsm8k"], "data=gsm8k cannot be changed here: grpo-eval run=a uses that run's own values"),
        (["run=a", "data.eval.limt=5"], "Try data.eval.limit=5"),
        (["run=a", "-m"], "no flags but --help"),
        (["run=a", "model.lora.rank=4"], "model.lora.rank=4 cannot be changed here: a checkpoint fits only the model"),
        (["run=a", "model.path=b"], "model.path=b cannot be changed here"),
        (["run=a", "model={dtype: bfloat16}"], "model={dtype: bfloat16} cannot be changed here"),
        (["run=a", "~model.lora"], "~model.lora cannot be changed here"),
        (["run=a", "checkpoint=7"], "there is no step 7"),
    ],
)
def test_grpo_eval_refuses_what_it_cannot_do_and_leaves_the_summary_alone(evaluation, capsys, argv, words):
    before = Path("a/summary.json").read_text()
    assert evaluate(*argv) == 1
    assert words in capsys.readouterr().err
    assert Path("a/summary.json").read_text() == before


def test_an_exit_out_of_an_evaluation_does_not_pass_for_success(evaluation, capsys):
    def leave(*_):
        raise SystemExit(0)

    evaluation.run = leave
    assert evaluate("run=a") == 1
    assert capsys.readouterr().err == "error: SystemExit: 0\nThe traceback is in a/error.log\n"


def test_grpo_sft_runs_its_stage_in_the_folder_given(stage, monkeypatch):
    module = types.ModuleType("sft")
    seen = []
    module.run = lambda cfg, run_dir, overrides: seen.append((cfg.demos.source.name, str(run_dir), overrides)) or {"status": "finished"}
    monkeypatch.setitem(sys.modules, "grpo_cli.stages.sft", module)
    assert run("demos=sloppy_addition", "hydra.run.dir=warm", command=cli.SFT) == 0
    assert seen == [("sloppy_addition", "warm", ["demos=sloppy_addition"])]


def test_an_interrupted_grpo_sft_exits_130(stage, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt("SIGTERM")

    module = types.ModuleType("sft")
    module.run = interrupted
    monkeypatch.setitem(sys.modules, "grpo_cli.stages.sft", module)
    assert run("demos=sloppy_addition", "hydra.run.dir=warm", command=cli.SFT) == 130


def test_the_scripts_are_installed():
    assert all(shutil.which(name, path=SCRIPTS) for name in ("grpo-train", "grpo-eval", "grpo-sft"))
