"""A run that was killed and resumed leaves the same rows as one that was not, value for value."""

import errno
import json
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from models import random_llama
from runs import config, dies, kill_on_call, numbers, rows, train
from safetensors.torch import load_file, save_file

from grpo_cli import checkpoint, collect, evaluation
from grpo_cli.policy import Policy
from grpo_cli.stages import grpo
from grpo_cli.tracking import Tracker
from grpo_cli.tracking.files import RowFiles


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    return folder


MOMENTS = {
    "before anything is evaluated": kill_on_call(grpo, "evaluate", 1),
    "inside the first evaluation": kill_on_call(evaluation, "score", 1),
    "before the first checkpoint": kill_on_call(checkpoint, "save", 1),
    "inside the first save": kill_on_call(Policy, "save", 1, after=True),
    "inside the first rollout": kill_on_call(collect, "uniforms", 1),
    "between a step and its row": kill_on_call(Tracker, "step", 3),
    "between groups.jsonl and metrics.jsonl": kill_on_call(RowFiles, "append", 7),
    "behind an evaluation, before its save": kill_on_call(Tracker, "evaluation", 3, after=True),
    "inside a later save": kill_on_call(torch, "save", 3),
    "behind the rename, before the pointers": kill_on_call(checkpoint, "point", 2),
    "while old checkpoints are removed": kill_on_call(shutil, "rmtree", 6),
    "inside the last update": kill_on_call(grpo, "improve", 9),
    "before the adapter is exported": kill_on_call(checkpoint, "export", 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_to_the_same_numbers(whole, tmp_path, moment):
    dies(tmp_path, MOMENTS[moment])
    summary = train(tmp_path, "resume=auto")
    assert summary["status"] == "finished"
    assert numbers(tmp_path) == numbers(whole)
    assert [row["step"] for row in rows(tmp_path, "metrics")] == list(range(1, 10))
    assert not list(tmp_path.glob("checkpoints/.*"))


def test_killed_again_and_again_it_still_arrives(whole, tmp_path):
    for call in (2, 3, 4):
        dies(tmp_path, kill_on_call(grpo, "improve", call), "resume=auto")
    train(tmp_path, "resume=auto")
    assert numbers(tmp_path) == numbers(whole)


def test_adaptive_kl_and_several_updates_resume_exactly(tmp_path):
    extra = ["kl=adaptive", "kl.target=0.01", "algorithm.updates_per_rollout=2", "optimizer.lr=3e-3"]
    train(tmp_path / "whole", *extra)
    dies(tmp_path / "killed", kill_on_call(grpo, "improve", 7), *extra)
    train(tmp_path / "killed", *extra, "resume=auto")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    betas = [row["kl/beta"] for row in rows(tmp_path / "whole", "metrics")]
    assert len(set(betas)) > 3


def test_full_fine_tuning_resumes_exactly(tmp_path):
    extra = ["model.lora=null", "optimizer.lr=3e-4"]
    train(tmp_path / "whole", *extra)
    dies(tmp_path / "killed", kill_on_call(grpo, "improve", 6), *extra)
    train(tmp_path / "killed", *extra, "resume=auto")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    assert (tmp_path / "whole/model/model.safetensors").is_file()


def test_every_prompt_is_drawn_once_per_epoch_and_in_the_same_order_after_a_resume(whole):
    # 20 problems, 2 per step: 9 steps draw 18 different ones.
    drawn = [row["problem"] for row in rows(whole, "groups")]
    assert len(drawn) == 18 == len(set(drawn))


def test_a_run_saved_at_the_end_of_an_epoch_goes_on(tmp_path):
    # 10 problems, 2 per step: an epoch ends with step 5, where the run is stopped and resumed.
    extra = ["data.train.limit=10", "save_every=5"]
    train(tmp_path, *extra, "steps=5")
    assert train(tmp_path, *extra, "steps=10", "resume=auto")["step"] == 10
    drawn = [row["problem"] for row in rows(tmp_path, "groups")]
    assert [row["step"] for row in rows(tmp_path, "metrics")] == list(range(1, 11))
    assert len(set(drawn[:10])) == len(set(drawn[10:])) == 10 and drawn[:10] != drawn[10:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_polite_signal_saves_and_leaves_a_state_to_resume(whole, tmp_path, number, monkeypatch):
    original = grpo.improve

    def improve(*args, **kwargs):
        result = original(*args, **kwargs)
        if len(rows(tmp_path, "metrics")) == 4:
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(grpo, "improve", improve)
    summary = train(tmp_path)
    assert (summary["status"], summary["step"]) == ("interrupted", 5)
    assert checkpoint.newest(tmp_path).name == "step_000005"
    monkeypatch.undo()
    assert train(tmp_path, "resume=auto")["status"] == "finished"
    assert numbers(tmp_path) == numbers(whole)


def test_a_checkpoint_without_its_state_file_is_passed_over(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    newest = checkpoint.newest(tmp_path / "run")
    (newest / "state.pt").unlink()
    assert checkpoint.newest(tmp_path / "run").name < newest.name
    train(tmp_path / "run", "resume=auto")
    assert numbers(tmp_path / "run") == numbers(whole)


def test_the_newest_checkpoints_and_the_best_are_kept(whole):
    summary = json.loads((whole / "summary.json").read_text())
    kept = {path.name for path in (whole / "checkpoints").glob("step_*")}
    best = f"step_{summary['evaluation']['best']['step']:06d}"
    assert {"step_000009", "step_000008", best} == kept | {best}
    assert checkpoint.find(whole, "best").name == best
    assert checkpoint.find(whole, "last").name == "step_000009"


def test_a_full_disk_leaves_the_earlier_checkpoint_whole(tmp_path, monkeypatch):
    original = torch.save

    def save(obj, file, **kwargs):
        if "step_000006" in getattr(file, "name", ""):
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(obj, file, **kwargs)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match=r"could not save the checkpoint of step 6.*No space left"):
        train(tmp_path, "save_every=2")
    assert checkpoint.newest(tmp_path).name == "step_000004"
    assert not list(tmp_path.glob("checkpoints/.*"))
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    monkeypatch.undo()
    train(tmp_path, "save_every=2", "resume=auto")
    assert len(rows(tmp_path, "metrics")) == 9


def test_a_full_disk_under_the_adapters_own_writer_is_an_os_error_and_leaves_nothing(tmp_path, monkeypatch):
    class SafetensorError(Exception):
        """What safetensors raises is no OSError."""

    def save(self, folder):
        folder.mkdir()
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    train(tmp_path, "steps=4")
    monkeypatch.setattr(Policy, "save", save)
    with pytest.raises(OSError, match=r"could not save the checkpoint of step \d.*No space left"):
        train(tmp_path, "steps=9", "resume=auto")
    assert checkpoint.newest(tmp_path).name == "step_000004" and not list(tmp_path.glob("checkpoints/.*"))


def test_lost_or_copied_pointers_are_mended(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "lost", symlinks=True)
    (tmp_path / "lost/checkpoints/best").unlink()
    (tmp_path / "lost/checkpoints/last").unlink()
    shutil.copytree(whole, tmp_path / "followed", symlinks=False)  # best and last are folders now
    shutil.copytree(whole, tmp_path / "bestless", symlinks=True)
    shutil.rmtree(checkpoint.find(tmp_path / "bestless", "best"))
    for name in ("lost", "followed", "bestless"):
        assert train(tmp_path / name, "steps=9", "resume=auto")["status"] == "finished"
        assert (tmp_path / name / "checkpoints/best").is_symlink()
        assert checkpoint.find(tmp_path / name, "last").name == "step_000009"


def test_foreign_folders_among_the_checkpoints_do_not_count(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    for name in ("step_abc", "step_000003.bak"):
        shutil.copytree(checkpoint.newest(whole), tmp_path / "run/checkpoints" / name)
    shutil.copytree(checkpoint.newest(whole), tmp_path / "run/checkpoints/step_1000000")
    assert checkpoint.newest(tmp_path / "run").name == "step_1000000"


def test_a_run_made_longer_follows_its_new_learning_rate_at_once(tmp_path):
    train(tmp_path / "long", "steps=8", "optimizer.warmup_steps=2")
    train(tmp_path / "grown", "steps=4", "optimizer.warmup_steps=2")
    train(tmp_path / "grown", "steps=8", "optimizer.warmup_steps=2", "resume=auto")
    rates = [[row["optim/lr"] for row in rows(tmp_path / name, "metrics")][4:] for name in ("long", "grown")]
    assert rates[0] == rates[1]
    with pytest.raises(ValueError, match="steps=8"):
        train(tmp_path / "grown", "steps=2", "optimizer.warmup_steps=2", "resume=auto")


@pytest.mark.parametrize("change", ["model.lora.rank=8", "algorithm.clip_low=0.1", "seed=2", "kl.beta=0.1", "steps=5"])
def test_resuming_with_another_model_or_algorithm_is_refused_and_harms_nothing(whole, tmp_path, change):
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"}
    with pytest.raises(ValueError, match=change.split("=")[0]):
        train(tmp_path / "run", change, "resume=auto")
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"}


def test_an_edited_config_is_not_continued_under_the_old_runs_name(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run", symlinks=True)
    file = tmp_path / "run/config.yaml"
    file.write_text(file.read_text().replace("clip_low: 0.2", "clip_low: 0.3"))
    with pytest.raises(ValueError, match=r"step_000009 was saved under another config: algorithm\.clip_low was 0\.2, is now 0\.3"):
        train(tmp_path / "run", "algorithm.clip_low=0.3", "steps=12", "resume=auto")


def test_a_run_is_not_continued_on_another_model_or_other_data(tmp_path):
    model, data = random_llama(tmp_path / "model"), tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(40)))
    words = ["model=hf", f"model.path={model}", "data=jsonl", f"data.path={data}", "data.prompt.chat=false", "steps=2", "save_every=1"]
    train(tmp_path / "run", *words)
    data.write_text(data.read_text().replace('"answer": "3"', '"answer": "4"'))
    with pytest.raises(ValueError, match=r"not the data that .*step_000002 was saved with: put the old files of data\.path back"):
        train(tmp_path / "run", *words, "steps=3", "resume=auto")
    data.write_text(data.read_text().replace('"answer": "4"', '"answer": "3"', 1))
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-6
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"not the model that .* put the old files of model\.path back"):
        train(tmp_path / "run", *words, "steps=3", "resume=auto")


def test_checkpoints_in_a_folder_without_a_config_are_not_continued(whole, tmp_path):
    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    for resume in ("null", "auto"):
        with pytest.raises(ValueError, match=r"holds files and no run \(checkpoints\)"):
            train(tmp_path, f"resume={resume}")


def test_two_processes_cannot_share_a_folder(tmp_path):
    child = os.fork()
    if child == 0:
        try:
            train(tmp_path, "steps=500", "eval_every=500", "stop.threshold=2")
        finally:
            os._exit(0)
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "metrics.jsonl").is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(ValueError, match="in use by"):
            train(tmp_path, "steps=500", "eval_every=500", "stop.threshold=2", "resume=auto")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_nothing_listens_for_signals_behind_a_run(whole):
    assert threading.current_thread() is threading.main_thread()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert config().steps == 9
