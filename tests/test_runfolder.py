import json
import os
import subprocess
import sys
import time

import pytest

from grpo_cli import cli, runfolder
from grpo_cli.compose import Composer, convert
from grpo_cli.runfolder import RunFolder


def compose(overrides=(), command=cli.TRAIN, name=None, directory=None):
    with Composer(command, name, directory) as composer:
        return convert(composer.compose(list(overrides)), list(overrides))


def leave(folder, cfg, status="interrupted"):
    with RunFolder(folder, cfg, [], resume=False) as run:
        run.update(status=status)
    return folder


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["~reward.rules.format"],
        ["+reward.rules.short.fn=my.module:short", "+reward.rules.short.args={limit: 3, name: 'on'}"],
        ["model.lora=null", "algorithm.std=population", "kl=linear"],
        ["data=gsm8k", "data.prompt.system='a: \"b\" # {c} \\${x} é'", "optimizer.lr=1e-5", "tracker.tags=[a,'1']"],
        ["data.prompt.chat=true", "data.prompt.examples=[{user: '1+1', assistant: '2'}]", "resume=auto"],
    ],
    ids=" ".join,
)
def test_config_yaml_reloads_to_the_same_config(tmp_path, overrides):
    before = compose(overrides)
    (tmp_path / "config.yaml").write_text(runfolder.to_yaml(before), encoding="utf-8")
    after = compose(name="config", directory=tmp_path)
    before.resume = None  # repeating a run is not continuing it
    assert after == before
    assert runfolder.load(tmp_path) == runfolder.values(before)


def test_config_yaml_of_grpo_sft_reloads(tmp_path):
    before = compose(["demos=sloppy_addition"], cli.SFT)
    (tmp_path / "config.yaml").write_text(runfolder.to_yaml(before), encoding="utf-8")
    assert compose(command=cli.SFT, name="config", directory=tmp_path) == before


def test_a_reloaded_config_takes_overrides(tmp_path):
    (tmp_path / "config.yaml").write_text(runfolder.to_yaml(compose()), encoding="utf-8")
    assert compose(["kl.beta=0.5", "~reward.rules.format"], name="config", directory=tmp_path).kl.beta == 0.5


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"not a run folder: .* has no config.yaml"):
        runfolder.load(tmp_path)
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(ValueError, match="was not written by a run"):
        runfolder.load(tmp_path)


@pytest.mark.parametrize(
    "damage", [b"a: ${b}", b"a: ${b", b"{", b"5", b"[]", b"", b"\xff\xfe", b"defaults: 3", b"defaults: {_grpo: 1}"], ids=repr
)
def test_a_damaged_config_is_one_message_and_does_not_hide_another_run(tmp_path, damage):
    leave(tmp_path / "whole", compose())
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.yaml").write_bytes(damage)
    with pytest.raises(
        ValueError, match=r"not a run folder: \S+/damaged/config.yaml (cannot be read: |was not written by a run)"
    ) as caught:
        runfolder.load(tmp_path / "damaged")
    assert "\n" not in str(caught.value)
    assert runfolder.newest_unfinished(tmp_path, compose()) == tmp_path / "whole"


@pytest.mark.parametrize("damage", [b"[]", b"5", b"{", b"", b"\xff\xfe"], ids=repr)
def test_a_damaged_summary_counts_as_none(tmp_path, damage):
    leave(tmp_path / "a", compose(), "finished")
    (tmp_path / "a" / "summary.json").write_bytes(damage)
    assert runfolder.summary(tmp_path / "a") == {}
    assert runfolder.newest_unfinished(tmp_path, compose()) == tmp_path / "a"
    assert not runfolder.is_done(tmp_path / "a", compose())


def test_a_running_folder_is_locked_and_says_by_whom(tmp_path):
    cfg = compose()
    with RunFolder(tmp_path, cfg, [], resume=False), pytest.raises(ValueError, match=f"in use by process {os.getpid()} on .*: wait for it"):
        RunFolder(tmp_path, cfg, [], resume=True).__enter__()
    with RunFolder(tmp_path, cfg, [], resume=True):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path):
    code = (
        "import os, sys, signal; from grpo_cli import cli; from grpo_cli.compose import *; from grpo_cli.runfolder import RunFolder\n"
        "with Composer(cli.TRAIN, None, None) as c: cfg = convert(c.compose([]), [])\n"
        "RunFolder(sys.argv[1], cfg, [], False).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path]).returncode == -9
    assert runfolder.summary(tmp_path)["status"] == "running"
    with RunFolder(tmp_path, compose(), [], resume=True) as run:
        assert run.summary["status"] == "running"


def test_a_folder_that_holds_a_run_is_refused_unless_it_is_continued(tmp_path):
    leave(tmp_path, compose())
    before = (tmp_path / "summary.json").read_text()
    with pytest.raises(ValueError, match=r"already holds a run: choose another folder.*resume=auto"):
        RunFolder(tmp_path, compose(), [], resume=False).__enter__()
    assert (tmp_path / "summary.json").read_text() == before


@pytest.mark.parametrize("name", ["adapter", "metrics.jsonl", "notes.txt"])
def test_a_folder_of_other_files_is_refused_and_they_stay(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=rf"holds files and no run \({name}\): choose another folder"):
        RunFolder(tmp_path, compose(), [], resume=False).__enter__()
    assert (tmp_path / name).read_text() == "mine" and not (tmp_path / "config.yaml").exists()


def test_a_folder_in_which_a_run_failed_to_start_is_taken(tmp_path):
    runfolder.record_failure(tmp_path, ValueError("no"))
    with RunFolder(tmp_path, compose(), [], resume=False) as run:
        assert run.summary["status"] == "running"


def test_continuing_with_another_model_or_algorithm_names_the_keys_and_damages_nothing(tmp_path):
    leave(tmp_path, compose())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = compose(["model.lora.rank=4", "algorithm.clip_low=0.1"])
    with pytest.raises(ValueError, match=r"model.lora.rank was 16, is now 4; algorithm.clip_low was 0.2, is now 0.1"):
        RunFolder(tmp_path, other, [], resume=True).__enter__()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_steps_and_the_tracker_may_change_when_a_run_is_continued(tmp_path):
    started = leave(tmp_path, compose()) and runfolder.summary(tmp_path)["started"]
    with RunFolder(tmp_path, compose(["steps=7", "tracker=none"]), ["steps=7"], resume=True) as run:
        assert run.summary["started"] == started
    assert runfolder.load(tmp_path)["steps"] == 7


def test_when_to_stop_may_change_but_not_by_which_metric(tmp_path):
    leave(tmp_path, compose())
    with RunFolder(tmp_path, compose(["stop.patience=3", "stop.threshold=0.9"]), [], resume=True):
        pass
    with pytest.raises(ValueError, match=r"another config: stop.metric was eval/accuracy, is now eval/reward: "):
        RunFolder(tmp_path, compose(["stop.metric=eval/reward"]), [], resume=True).__enter__()


def test_a_failure_is_recorded_with_its_traceback(tmp_path):
    with pytest.raises(ZeroDivisionError), RunFolder(tmp_path, compose(), ["seed=1"], resume=False):
        _ = 1 / 0
    found = runfolder.summary(tmp_path)
    assert (found["status"], found["reason"], found["overrides"], found["seed"]) == (
        "failed",
        "ZeroDivisionError: division by zero",
        ["seed=1"],
        1,
    )
    assert "1 / 0" in (tmp_path / "error.log").read_text()


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit()], ids=repr)
def test_leaving_by_an_exit_is_a_failure(tmp_path, error):
    with pytest.raises(type(error)), RunFolder(tmp_path, compose(), [], resume=False):
        raise error
    found = runfolder.summary(tmp_path)
    assert found["status"] == "failed" and found["reason"].startswith(type(error).__name__)


def test_an_interrupt_is_not_a_failure(tmp_path):
    with pytest.raises(KeyboardInterrupt), RunFolder(tmp_path, compose(), [], resume=False):
        raise KeyboardInterrupt
    assert runfolder.summary(tmp_path)["status"] == "interrupted"
    assert not (tmp_path / "error.log").exists()


def test_a_folder_that_cannot_be_written_is_one_clear_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write into .*/file/run: Not a directory: choose another hydra.run.dir"):
        RunFolder(tmp_path / "file" / "run", compose(), [], resume=False).__enter__()


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    runfolder.write_json(tmp_path / "a.json", {"a": 1})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        runfolder.write_json(tmp_path / "a.json", {"a": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_the_newest_unfinished_run_of_the_same_config_is_found(tmp_path):
    cfg = compose()
    leave(tmp_path / "other", compose(["kl.beta=1"]))
    for age, (name, status) in enumerate([("done", "finished"), ("new", "interrupted"), ("old", "failed")]):
        leave(tmp_path / name, cfg, status)
        os.utime(tmp_path / name / "config.yaml", (time.time() - age, time.time() - age))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.yaml").write_text("x: 1")
    assert runfolder.newest_unfinished(tmp_path, cfg) == tmp_path / "new"
    assert runfolder.newest_unfinished(tmp_path, compose(["kl.beta=2"])) is None


def test_a_run_is_done_only_with_the_same_number_of_steps(tmp_path):
    leave(tmp_path, compose(), "finished")
    assert runfolder.is_done(tmp_path, compose(["resume=auto", "tracker=none"]))
    assert not runfolder.is_done(tmp_path, compose(["steps=200"]))
