import json
import math
import signal
import subprocess
import sys

import pytest

from grpo_cli.tracking.files import KINDS, RowFiles, read_rows


def test_every_row_is_on_disk_when_written_and_nan_becomes_null(tmp_path):
    files = RowFiles(tmp_path, None)
    files.append("metrics", [{"step": 1, "a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}}])
    files.append("samples", [{"step": 1, "text": "\ud800 \u2028 ü"}, {"step": 1, "text": "two"}])
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": None, "b": [None, 1.5], "c": {"d": None}}
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["\ud800 \u2028 ü", "two"]


def test_a_fresh_start_empties_what_an_earlier_try_left(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    RowFiles(tmp_path, None).close()
    assert [(tmp_path / f"{kind}.jsonl").read_bytes() for kind in KINDS] == [b""] * len(KINDS)


def test_resume_keeps_rows_up_to_its_step_byte_for_byte(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "x":  0.10}\n{"step": 2}\n{"step": 3}\n{"step": 4, "re')
    (tmp_path / "eval.jsonl").write_bytes(b'{"step": 0}\n{"st')
    files = RowFiles(tmp_path, 2)  # groups.jsonl and samples.jsonl are missing
    files.append("metrics", [{"step": 3, "x": 1}])
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1, "x":  0.10}\n{"step": 2}\n{"step": 3, "x": 1}\n'
    assert (tmp_path / "eval.jsonl").read_bytes() == b'{"step": 0}\n'
    assert (tmp_path / "groups.jsonl").read_bytes() == b""
    assert files.damaged == 0 and sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{kind}.jsonl" for kind in KINDS)


def test_whole_lines_that_are_no_rows_are_counted(tmp_path):
    (tmp_path / "groups.jsonl").write_bytes(b'{"step": 1}\n\x00\x00\n[1]\n{"step": 2}\n')
    files = RowFiles(tmp_path, 5)
    assert files.damaged == 2
    assert read_rows(tmp_path / "groups.jsonl", 5) == [{"step": 1}, {"step": 2}]


def test_a_killed_process_loses_no_row_it_had_written(tmp_path):
    program = f"""
from pathlib import Path
from grpo_cli.tracking.files import RowFiles
files = RowFiles(Path({str(tmp_path)!r}), None)
for step in range(10**9):
    files.append("metrics", [{{"step": step, "x": "y" * 3000}}])
    print(step, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        for _ in range(50):
            written = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        written = max([written, *map(int, process.stdout.read().split(b"\n")[:-1])])
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]
    assert steps == list(range(len(steps))) and len(steps) > written


def test_a_full_disk_names_the_file_and_leaves_whole_rows(tmp_path):
    # A file size limit of 1000 bytes refuses the second row half way, as a full disk does.
    program = f"""
import resource
from pathlib import Path
from grpo_cli.tracking.files import RowFiles
files = RowFiles(Path({str(tmp_path)!r}), None)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
files.append("metrics", [{{"step": 1, "x": "y" * 600}}])
try:
    files.append("metrics", [{{"step": 2, "x": "y" * 600}}])
except OSError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "File too large" in said and str(tmp_path / "metrics.jsonl") in said
    assert read_rows(tmp_path / "metrics.jsonl", 9) == [{"step": 1, "x": "y" * 600}]
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")


def test_a_folder_that_cannot_be_written_is_an_error_with_the_files_name(tmp_path):
    with pytest.raises(OSError, match=r"gone/metrics\.jsonl"):
        RowFiles(tmp_path / "gone", None)
