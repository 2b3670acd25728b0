"""A rule that misbehaves in a run: it is counted, shown, scored as its config says, and the run goes on or stops as asked."""

import os
import time

import pytest
from runs import rows, train


def moody(sample):
    """Sleeps, dies or raises on some of the completions."""
    mood = len(sample.text) % 4
    if mood == 0:
        time.sleep(1000)
    if mood == 1:
        os._exit(1)
    if mood == 2:
        raise KeyError("mood")
    return 1.0


WORDS = ["+reward.rules.moody.fn=test_rules_in_training:moody", "+reward.rules.moody.on_error=-1", "reward.timeout_s=0.3", "steps=1"]


def test_a_run_lives_with_a_rule_that_hangs_dies_and_raises(tmp_path, capsys):
    summary = train(tmp_path, *WORDS, "reward.max_error_frac=1", "reward.gate.mode=off")
    assert summary["status"] == "finished"
    (step,), groups = rows(tmp_path, "metrics"), rows(tmp_path, "groups")
    assert 0 < step["reward/errors/moody"] < 8 and step["reward/errors/accuracy"] == 0
    # 1 where it judged, -1 where it failed; of eight completions
    assert step["reward/rule/moody"] == pytest.approx((8 - 2 * step["reward/errors/moody"]) / 8)
    assert sum(len(group["rewards"]) for group in groups) == 8
    assert "reward rule 'moody'" in capsys.readouterr().out


def test_a_run_stops_when_a_rule_fails_too_often(tmp_path):
    with pytest.raises(ValueError, match=r"reward rule 'moody' failed on \d of \d+ completions, more than reward\.max_error_frac=0\.1"):
        train(tmp_path, *WORDS, "reward.gate.mode=off")
