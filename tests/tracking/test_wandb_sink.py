import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import wandb
from tracked import feed, groups_of, metrics_of, wandb_history, wandb_records

from grpo_cli.tracking import wandb_sink


def test_every_step_and_both_histograms_and_the_growing_table_reach_the_offline_file(track, tmp_path, capfd):
    tracker = track(group="sweep")
    tracker.evaluation(0, {"eval/accuracy": 0.0})
    feed(tracker, range(1, 5))
    tracker.finish("finished", "", [])
    rows = wandb_history(tmp_path / "run")
    train = [row for row in rows if "reward/mean" in row]
    assert [row["step"] for row in train] == [1, 2, 3, 4]
    assert all({"reward/group_std", "kl/reference", "kl/beta"} <= row.keys() for row in train)
    for row in train:
        for key in ("reward/group_std_hist", "kl/group_hist"):
            assert row[key]["_type"] == "histogram" and sum(row[key]["values"]) == 4  # one count per group
    # An evaluation of a step does not displace its training row.
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 4]
    tables = [row["samples"] for row in rows if "samples" in row]
    assert [table["_type"] for table in tables] == ["incremental-table-file"] * 2
    contents = [json.loads(next((tmp_path / "run/wandb").glob(f"offline-run-*/files/{table['path']}")).read_text()) for table in tables]
    assert [[line[0] for line in content["data"]] for content in contents] == [[2, 2], [4, 4]]  # each adds its own rows
    assert contents[0]["columns"] == wandb_sink.COLUMNS and contents[0]["data"][0][5] == "accuracy 1, format 0.5"
    assert [table["increment_num"] for table in tables] == [0, 1]
    metrics = [record.metric for record in wandb_records(tmp_path / "run") if record.WhichOneof("record_type") == "metric"]
    assert any(metric.glob_name == "*" and metric.step_metric == "step" for metric in metrics)
    said = capfd.readouterr()
    assert "wandb: offline" in said.out and "wandb leet" in said.out and said.err == ""


def test_jobs_of_one_process_are_separate_runs_of_one_group_with_their_own_config(track, tmp_path):
    for name in ("beta0", "beta1"):  # one after another, and the next two at once
        tracker = track(name, group="sweep")
        feed(tracker, [1])
        tracker.finish("failed", "", [])
    together = [track(name, group="sweep") for name in ("beta2", "beta3")]
    for tracker in together:
        feed(tracker, [1])
    for tracker in together:
        tracker.finish("finished", "", [])
    runs, ids = [], set()
    for name in ("beta0", "beta1", "beta2", "beta3"):
        [run] = [record.run for record in wandb_records(tmp_path / name) if record.WhichOneof("record_type") == "run"]
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        runs.append((run.run_group, run.display_name, config["name"], config["kl"]))
        ids.add(run.run_id)
        assert len([row for row in wandb_history(tmp_path / name) if "reward/mean" in row]) == 1
    assert runs == [("sweep", name, name, {"beta": 0.04, "schedule": "auto"}) for name in ("beta0", "beta1", "beta2", "beta3")]
    assert len(ids) == 4


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("interrupted", 0), ("failed", 1)])
def test_the_run_is_closed_with_the_status_of_the_training(track, tmp_path, status, code):
    tracker = track()
    tracker.finish(status, "", [])
    tracker.finish("failed", "a second call does nothing", [])
    assert [record.exit.exit_code for record in wandb_records(tmp_path / "run") if record.WhichOneof("record_type") == "exit"] == [code]


def test_resume_logs_each_step_once_and_catches_up_on_what_was_only_queued(track, tmp_path):
    first = track()
    feed(first, range(1, 7))
    first.finish("interrupted", "", [])
    # The state of a process killed while the evaluation of step 4 and all behind step 5 were still queued.
    (tmp_path / "run/wandb/high_water.json").write_text(json.dumps({"id": first.wandb_id, "train": 5, "eval": 2, "samples": 4}))
    second = track(resume_step=4, wandb_id=first.wandb_id)
    assert second.wandb_id == first.wandb_id
    feed(second, range(5, 9))
    second.finish("finished", "", [])
    resumed = sorted((tmp_path / "run").glob("wandb/offline-run-*"))[-1]
    rows = wandb_history(_only(resumed, tmp_path / "only"))
    assert [row["step"] for row in rows if "reward/mean" in row] == [6, 7, 8]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [4, 6, 8]
    assert [row["step"] for row in rows if "samples" in row] == [6, 8]


def _only(wandb_run: Path, folder: Path) -> Path:
    (folder / "wandb").mkdir(parents=True)
    (folder / "wandb" / wandb_run.name).symlink_to(wandb_run)
    return folder


def test_a_run_that_was_never_with_wandb_is_told_from_its_first_step(track, tmp_path):
    plain = track(wandb=None)
    feed(plain, range(1, 4))
    plain.finish("interrupted", "", [])
    tracker = track(resume_step=2)
    feed(tracker, [3])
    tracker.finish("finished", "", [])
    assert [row["step"] for row in wandb_history(tmp_path / "run") if "kl/group_hist" in row] == [1, 2, 3]


def test_a_wandb_that_raises_is_warned_about_once_and_counted(track, tmp_path, monkeypatch, capsys):
    class Broken:
        url = ""

        def __getattr__(self, name):
            def fail(*args, **kwargs):
                if name == "define_metric":
                    return
                raise RuntimeError("no quota")

            return fail

    monkeypatch.setattr(wandb, "init", lambda **kwargs: Broken())
    tracker = track()
    feed(tracker, range(1, 5))
    tracker.finish("finished", "", [])
    said = capsys.readouterr().out
    assert said.count("wandb did not take a row (RuntimeError: no quota)") == 1
    assert "wandb missed 8 row(s)" in said  # 4 of training, 2 of evaluation, 2 of samples
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 4


def test_a_wandb_that_does_not_start_leaves_the_run_alone(track, monkeypatch, capsys):
    def init(**kwargs):
        raise OSError("disk quota exceeded")

    monkeypatch.setattr(wandb, "init", init)
    feed(track(), range(1, 3))
    track().finish("finished", "", [])
    assert "wandb did not start offline (OSError: disk quota exceeded)" in capsys.readouterr().out


def test_a_wandb_that_blocks_slows_neither_the_steps_nor_the_end(track, monkeypatch, capsys):
    class Stuck:
        def define_metric(self, *args, **kwargs):
            pass

        def log(self, row):
            time.sleep(3600)

    monkeypatch.setattr(wandb, "init", lambda **kwargs: Stuck())
    monkeypatch.setattr(wandb_sink, "_restart_wandb", lambda: None)
    monkeypatch.setattr(wandb_sink, "FINISH_LIMIT_S", 0.5)
    monkeypatch.setattr(wandb_sink, "QUEUE_ROWS", 10)
    tracker = track()
    start = time.monotonic()
    for step in range(1, 101):
        tracker.step(step, metrics_of(step), groups_of(step))
    assert time.monotonic() - start < 1
    start = time.monotonic()
    tracker.finish("finished", "", [])
    assert time.monotonic() - start < 3
    said = capsys.readouterr().out
    assert said.count("it is 10 rows behind") == 1 and "wandb did not finish in" in said
    # 100 rows, of which one is in wandb's hands for ever.
    assert "wandb missed 99 row(s)" in said


def test_a_wandb_that_cannot_be_imported_is_a_warning(track, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    feed(track(), [1])
    assert "warning: wandb: off, it cannot be used" in capsys.readouterr().out


def test_the_mode_follows_config_then_environment_then_credentials(track, tmp_path, monkeypatch, capsys):
    starts = []
    monkeypatch.setattr(wandb_sink.WandbSink, "_start", lambda self: starts.append(self._mode))

    def mode(name, **environment):
        with monkeypatch.context() as patch:
            for key, value in environment.items():
                patch.setenv(key, value)
            track(wandb=name).finish("finished", "", [])
        return starts.pop() if starts else "off"

    key = "0" * 40
    assert mode("auto") == "offline"
    assert mode("auto", WANDB_API_KEY=key) == "online"
    assert mode("auto", WANDB_API_KEY=key, WANDB_MODE="offline") == "offline"
    assert mode("auto", WANDB_MODE="disabled") == "off"
    assert mode("disabled", WANDB_API_KEY=key) == "off"
    assert mode("offline", WANDB_API_KEY=key, WANDB_MODE="online") == "offline"
    capsys.readouterr()
    assert mode("online") == "offline"  # wandb would stop and ask for a key
    assert "warning: wandb: offline (no credentials found" in capsys.readouterr().out
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {key}\n")
    netrc.chmod(0o600)
    assert mode("auto", NETRC=str(netrc)) == "online"


PROGRAM = """
import sys
from pathlib import Path
from grpo_cli.config import TrackerName, TrackerSection, WandbMode
from grpo_cli.tracking import Tracker, wandb_sink
wandb_sink.INIT_LIMIT_S = 2
section = TrackerSection(TrackerName.wandb, WandbMode[sys.argv[2]], "p", None, None, None, [])
run_dir = Path(sys.argv[1])
run_dir.mkdir()
tracker = Tracker(run_dir, section, config={}, total_steps=2, log_every=1, resume_step=None, wandb_id=None, group=None, run_name="r")
tracker.step(1, {"reward/mean": 1.0, "kl/reference": 0.0}, [])
tracker.finish("finished", "", [])
"""


def environment(**changes):
    """Without the address of this process's own wandb helper."""
    return {key: value for key, value in os.environ.items() if key not in ("WANDB_SERVICE", "WANDB_ERROR_REPORTING")} | changes


@pytest.fixture
def silent_server():
    """Takes connections and never answers; the list of them."""
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", taken


@pytest.mark.parametrize("mode", ["auto", "offline", "disabled"])
def test_without_credentials_or_input_nothing_goes_over_the_network(tmp_path, silent_server, mode):
    url, taken = silent_server
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), mode]
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    here = environment(WANDB_BASE_URL=url, HTTPS_PROXY=url, HTTP_PROXY=url)
    done = subprocess.run(closed, env=here, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, taken) == (0, "", [])
    assert (tmp_path / "run/wandb").exists() == (mode != "disabled")


def test_a_server_that_never_answers_turns_online_into_offline(tmp_path, silent_server):
    url, taken = silent_server
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), "auto"]
    here = environment(WANDB_BASE_URL=url, WANDB_API_KEY="0" * 40)
    done = subprocess.run(command, env=here, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0 and done.stderr == "" and taken
    assert "wandb did not start online" in done.stdout and "wandb: offline instead" in done.stdout
    [offline] = (tmp_path / "run").glob("wandb/offline-run-*")
    assert [row["reward/mean"] for row in wandb_history(_only(offline, tmp_path / "only")) if "reward/mean" in row] == [1.0]
