"""Rows of a small run, and a reader of wandb's offline files."""

import json
import struct
import time
from pathlib import Path


def metrics_of(step):
    return {"reward/mean": 0.25 * step, "reward/group_std": 0.5, "kl/reference": 0.01 * step, "kl/beta": 0.04, "completion/tokens": 24.0}


def groups_of(step):
    group = {"rewards": [1.0, 0.0], "reward_mean": 0.5, "lengths": [3, 4], "verdict": "mixed"}
    return [{"step": step, "problem": f"p{i}", "reward_std": 0.1 * i, "kl": 0.02 * i, **group} for i in range(4)]


def sample_of(step, text="<answer>82</answer>", total=1.0):
    sample = {"step": step, "problem": "p0", "prompt": "67+15=", "completion": text, "answer": "82"}
    return {**sample, "rewards": {"accuracy": total, "format": 0.5}, "total": total, "tokens": 9, "ended": "eos"}


def feed(tracker, steps):
    """Train the steps; every second one is evaluated and sampled."""
    for step in steps:
        tracker.step(step, metrics_of(step), groups_of(step))
        if step % 2 == 0:
            tracker.samples(step, [sample_of(step), sample_of(step, total=0.0)])
            tracker.evaluation(step, {"eval/accuracy": 0.1 * step, "eval/accuracy_se": 0.01})


def wandb_records(folder: Path):
    """Every record of the finished wandb runs below a run folder. wandb's helper process may still be writing the last of them."""
    deadline, records = time.monotonic() + 10, []
    for path in sorted(folder.glob("wandb/*run-*/run-*.wandb")):
        while not (of_run := list(_records(path.read_bytes()))) or of_run[-1].WhichOneof("record_type") != "exit":
            assert time.monotonic() < deadline, f"{path} was not closed"
            time.sleep(0.05)
        records += of_run
    return records


def _records(data: bytes):
    """wandb's file is a log in LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block, too short for a header
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_history(folder: Path):
    """The logged rows; histograms and tables are mappings."""
    rows = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            row = {}
            for item in record.history.item:
                *outer, key = item.nested_key or [item.key]
                place = row
                for name in outer:
                    place = place.setdefault(name, {})
                place[key] = json.loads(item.value_json)
            rows.append(row)
    return rows
