"""The benchmark's arithmetic, and one short run of it, so that it does not break unseen between two benchmarks."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "benchmarks"
MACHINE = {"device": "cpu", "gflops": 1e-9, "gbs": 1e-9}  # one FLOP and one byte per second


@pytest.fixture
def floor(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("floor")
    monkeypatch.setattr(module, "RANK", 0)
    monkeypatch.setattr(module, "cache_bytes", lambda: 2**30)
    return module


def one_layer(folder: Path) -> Path:
    """Width 2, one head: 4 x 4 weights of attention, 3 x 2 of the MLP, 10 of the head."""
    sizes = {"hidden_size": 2, "intermediate_size": 1, "num_hidden_layers": 1, "vocab_size": 5}
    (folder / "config.json").write_text(json.dumps(sizes | {"num_attention_heads": 1, "num_key_value_heads": 1}))
    return folder


def test_the_floor_counts_the_prompt_once_and_every_completion_token_but_the_last(tmp_path, floor):
    # One prompt of 1 token, 2 completions of 2 tokens, so 3 tokens are read; 22 weights, 2 FLOPs each: 132 a pass. A completion token
    # attends to 2 tokens, the prompt's to 1: 5 pairs, 4 x 2 FLOPs each: 40. The head on 3 tokens: 60.
    forward, head = 132 + 40, 60
    # Rollout, reference, update; the update's forward leaves out the prompt (44 + 8). Backward: 132 and 10 x 2 per pair; the head twice.
    update = forward - 52 + 132 + 100 + 2 * head
    found = floor.floors(one_layer(tmp_path), 1, 2, 1, 2, 1, MACHINE)
    assert found["rollout_floor_s"] == pytest.approx(forward + head)
    assert found["floor_s"] == pytest.approx(2 * (forward + head) + update)


def test_without_a_cache_decoding_takes_the_time_of_its_bytes(tmp_path, floor, monkeypatch):
    cached = floor.floors(one_layer(tmp_path), 1, 2, 1, 2, 1, MACHINE)["rollout_floor_s"]
    monkeypatch.setattr(floor, "cache_bytes", lambda: 0)
    # One decoding step reads 32 weights and keys and values of 1 + 2 x 2 / 2 tokens, 4 each, in 4 bytes; its FLOPs were 88 + 32 + 40.
    assert floor.floors(one_layer(tmp_path), 1, 2, 1, 2, 1, MACHINE)["rollout_floor_s"] - cached == pytest.approx(4 * (32 + 4 * 3) - 160)


def test_the_benchmark_times_whole_steps_of_a_run(tmp_path):
    setting = {"model": "embedded", "P": 1, "G": 2, "S": 12, "T": 5, "updates": 1, "steps": 2}
    setting |= {"micro_batch_tokens": 64, "rows_at_once": 8}
    command = [sys.executable, str(FOLDER / "contender.py"), "ours", json.dumps(setting), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found["steps"]) == 2 and found["peak_mb"] > 100
    for step in found["steps"]:
        parts = [step[part] for part in ("rollout", "reference", "update", "other")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(step["step"])
