import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_cli import cli
from grpo_cli.compose import Composer, convert
from grpo_cli.stages import score


def scored(*overrides):
    words = ["reward.workers=1", *overrides]
    with Composer(cli.SCORE, None, None) as composer:
        return score.run(convert(composer.compose(words), words))


@pytest.fixture
def completions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"id": "a", "completion": "<think>x</think><answer>12</answer>", "answer": "12"},
        {"id": "b", "completion": "<think>x</think><answer>13</answer>", "gold": 12},
        {"completion": "[bold]no", "answer": "a text"},
    ]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "scoring.py").write_text("def picky(sample):\n    return {'a': 0.25, 'b': None}.get(sample.problem.id, 2)\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_rows_are_scored_in_order_saved_and_shown(completions, capsys):
    rows = scored(
        "completions=completions.jsonl", "save=scores.jsonl", "+reward.rules.mine.fn=scoring:picky", "+reward.rules.mine.weight=2"
    )
    assert [row["id"] for row in rows] == ["a", "b", "3"]
    assert [row["total"] for row in rows] == [1.0 + 0.5 + 0.5, 0.5, 4.0]
    assert [row["rules"]["accuracy"] for row in rows] == [1.0, 0.0, None]
    assert rows[1]["rules"]["mine"] == 0 and rows[1]["errors"]["mine"].startswith("returned None")
    assert [json.loads(line) for line in Path("scores.jsonl").read_text().splitlines()] == rows
    shown = capsys.readouterr().out
    assert "3 completions" in shown and "slowest" in shown and "failed" in shown and "[bold]no" in shown and "scores.jsonl" in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"answer": "1"}', r"row 1: completion must be a text, not None \(it has the fields: answer\)"),
        ('{"completion": "x"}\n{"completion": 3}', "row 2: completion must be a text, not 3"),
        ('{"completion": "x", "ended": "soon"}', "row 1: ended is eos or length, not 'soon'"),
        ('{"completion": "x", "ended": []}', r"row 1: ended is eos or length, not \[\]"),
        ('{"completion": "x", "tokens": -1}', "row 1: tokens must be a whole number"),
        ('{"completion": ', "line 1 is not valid JSON"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named_and_nothing_is_written(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        scored("completions=c.jsonl", "save=s.jsonl")
    assert not (tmp_path / "s.jsonl").exists()


def test_a_missing_file_or_folder_is_named(completions):
    with pytest.raises(ValueError, match=r"completions=nowhere\.jsonl does not exist"):
        scored("completions=nowhere.jsonl")
    with pytest.raises(ValueError, match=r"save=no/s\.jsonl: there is no such folder"):
        scored("completions=completions.jsonl", "save=no/s.jsonl")
    for save, why in (("completions.jsonl", "would replace the completions"), (".", "must name a plain file"), ("s.gz", "plain file")):
        with pytest.raises(ValueError, match=rf"save={re.escape(save)} .*{why}.*: try save=scores\.jsonl"):
            scored("completions=completions.jsonl", f"save={save}")
    with pytest.raises(ValueError, match=r"completions is not set: try completions=FILE\.jsonl"):
        scored()


def test_scoring_needs_no_torch(completions):
    code = (
        "import sys\nfrom grpo_cli import cli\nsys.argv = ['grpo-score', 'completions=completions.jsonl', 'reward.workers=1']\n"
        "try:\n    cli.score()\nexcept SystemExit as end:\n    assert end.code == 0\nassert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
