import json
import math
import os
from pathlib import Path

import pytest
import torch
from models import model_section
from runs import config, numbers, raw, rows, train

from grpo_cli import checkpoint, runfolder
from grpo_cli.cli import TRAIN
from grpo_cli.compose import Composer, convert
from grpo_cli.config import GrpoRun
from grpo_cli.evaluation import pass_at
from grpo_cli.policy import Distribution, load_policy
from grpo_cli.records import Problem
from grpo_cli.stages import eval as evaluation_stage
from grpo_cli.stages import grpo

FIXED = [
    "reward/mean",
    "reward/group_std",
    "reward/rule/accuracy",
    "reward/rule/format",
    "group/frac_zero_std",
    "group/frac_all_right",
    "group/frac_all_wrong",
    "kl/reference",
    "kl/sequence",
    "kl/beta",
    "policy/entropy",
    "policy/clip_frac",
    "policy/ratio_max",
    "optim/lr",
    "optim/grad_norm",
    "completion/tokens",
    "completion/truncated_frac",
    "time/rollout_s",
    "time/reward_s",
    "time/update_s",
    "time/step_s",
    "speed/tokens_per_s",
    "memory/peak_gib",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    train(folder)
    return folder


def test_every_step_has_every_metric_of_the_contract(finished):
    for row in raw(finished, "metrics"):
        assert set(FIXED) <= set(row)
        assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in row.values())


def test_the_run_folder_explains_the_run(finished):
    summary = json.loads((finished / "summary.json").read_text())
    assert (summary["status"], summary["reason"], summary["seed"], summary["device"]) == ("finished", "all 9 steps taken", 1, "cpu")
    assert {"first", "best", "last"} == set(summary["evaluation"])
    assert summary["tokens"] == sum(sum(row["lengths"]) for row in rows(finished, "groups"))
    assert summary["peak_memory_gib"] > 0 and summary["training_seconds"] > 0 and summary["versions"]["torch"]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in (finished / "adapter").iterdir()}
    assert [row["step"] for row in rows(finished, "eval")] == [0, 3, 6, 9]
    assert {row["step"] for row in rows(finished, "samples")} == {1, 2, 4, 6, 8}


def test_group_rows_agree_with_the_step(finished):
    groups, steps = rows(finished, "groups"), rows(finished, "metrics")
    for step in steps:
        own = [g for g in groups if g["step"] == step["step"]]
        assert len(own) == 2 and all(len(g["rewards"]) == 4 for g in own)
        assert step["reward/mean"] == pytest.approx(sum(sum(g["rewards"]) for g in own) / 8, abs=1e-6)
        assert step["reward/group_std"] == pytest.approx(sum(g["reward_std"] for g in own) / 2, abs=1e-6)
        assert step["kl/sequence"] == pytest.approx(sum(g["kl"] for g in own) / 2, abs=1e-6)
        assert step["group/frac_zero_std"] == sum(len(set(g["rewards"])) == 1 for g in own) / 2


def test_evaluation_uses_each_problem_once_with_its_own_number_of_samples(finished):
    # 4 held-out problems, 2 samples each, although training draws 4 per group; eval batches need not divide anything.
    for row in rows(finished, "eval"):
        assert (row["eval/accuracy_n"], row["eval/accuracy_greedy_n"], row["eval/pass@2_n"]) == (8, 4, 4)
        assert row["eval/pass@2"] >= row["eval/accuracy"]


def test_seven_problems_in_uneven_batches_are_seven_results(tmp_path):
    train(tmp_path, "steps=1", "eval_every=1", "data.eval.limit=7", "rollout.rows_at_once=4")
    assert rows(tmp_path, "eval")[-1]["eval/accuracy_n"] == 14
    assert rows(tmp_path, "eval")[-1]["eval/accuracy_greedy_n"] == 7


def test_pass_at_k_by_hand():
    # 4 samples, 2 right: pass@2 = 1 - C(2,2)/C(4,2) = 5/6; none right 0; 3 right always 1.
    assert pass_at(torch.tensor([2.0, 0.0, 3.0]), 4, 2).tolist() == pytest.approx([5 / 6, 0.0, 1.0])
    assert pass_at(torch.tensor([1.0]), 4, 1).tolist() == pytest.approx([0.25])


def test_evaluating_and_saving_more_often_changes_no_step(finished, tmp_path):
    train(tmp_path, "eval_every=2", "save_every=1", "sample_every=1")
    assert rows(tmp_path, "metrics") == rows(finished, "metrics")


def test_another_seed_is_another_run(finished, tmp_path):
    train(tmp_path, "seed=2", "steps=2")
    assert rows(tmp_path, "metrics")[0] != rows(finished, "metrics")[0]


def test_the_written_config_repeats_the_run_value_for_value(finished, tmp_path):
    with Composer(TRAIN, "config", finished) as composer:
        cfg = convert(composer.compose([]), [])
    assert isinstance(cfg, GrpoRun)
    grpo.run(cfg, tmp_path, [])
    assert numbers(tmp_path) == numbers(finished)


def test_micro_batches_change_a_run_by_rounding_only(finished, tmp_path):
    train(tmp_path, "model.micro_batch_tokens=60", "steps=2")
    for a, b in zip(rows(tmp_path, "metrics"), rows(finished, "metrics")[:2], strict=True):
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-4)
        assert a["reward/mean"] == b["reward/mean"]


def test_kl_is_zero_at_the_first_step_and_measured_now_and_then_without_a_penalty(tmp_path):
    train(tmp_path, "kl=none", "kl.measure_every=4")
    measured = {row["step"]: row["kl/reference"] for row in rows(tmp_path, "metrics") if "kl/reference" in row}
    assert set(measured) == {1, 4, 8, 9} and measured[1] == 0.0 and measured[9] > 0
    assert all(row["kl/beta"] == 0 for row in rows(tmp_path, "metrics"))


@pytest.mark.parametrize("kl", ["linear", "cosine"])
def test_schedules_reach_their_end_value_at_the_last_step(tmp_path, kl):
    train(tmp_path, f"kl={kl}", "kl.beta=0.2", "kl.end_beta=0.05", "steps=3")
    betas = [row["kl/beta"] for row in rows(tmp_path, "metrics")]
    assert betas == pytest.approx([0.2, 0.125, 0.05]) and betas[-1] == 0.05


def test_a_run_whose_groups_are_all_equal_ends_without_moving(tmp_path):
    train(tmp_path, "reward.rules.accuracy.weight=0", "reward.rules.format.weight=0", "kl=none", "steps=3")
    for row in rows(tmp_path, "metrics"):
        assert row["group/frac_zero_std"] == 1.0 and row["optim/grad_norm"] == 0.0 and row["loss"] == 0.0


def test_truncated_completions_are_counted_and_can_be_left_out_of_the_loss(tmp_path):
    train(tmp_path, "rollout.max_new_tokens=3", "algorithm.truncated=mask", "steps=2", "kl.beta=0.5")
    for row in rows(tmp_path, "metrics"):
        assert row["completion/truncated_frac"] == 1.0 and row["optim/trained_frac"] == 0.0
        assert row["loss"] == 0.0 and row["optim/grad_norm"] == 0.0


@pytest.mark.parametrize(
    ("override", "words"),
    [("stop.threshold=0.0", "stop.threshold=0"), ("stop.patience=1", "for 1 evaluations")],
    ids=["reached", "patience"],
)
def test_a_run_stops_when_told_to_and_says_why(tmp_path, override, words):
    summary = train(tmp_path, override)
    assert summary["status"] == "stopped" and words in summary["reason"]
    assert summary["step"] < 9


def test_grpo_eval_measures_the_saved_policy(finished):
    cfg = config()
    result = evaluation_stage.run(cfg, finished, "last", [])
    last = rows(finished, "eval")[-1]
    assert {key: value for key, value in result.items() if key.startswith("eval/")} == {k: v for k, v in last.items() if k != "step"}
    assert json.loads((finished / "evaluations/step_000009.json").read_text())["problems"] == 4
    with pytest.raises(ValueError, match="step_000009"):
        evaluation_stage.run(cfg, finished, "77", [])
    overrides = ["data.eval.limit=2"]
    other = evaluation_stage.run(config(*overrides), finished, str(finished / "checkpoints/step_000009"), overrides)
    written = json.loads(Path(other["file"]).read_text())
    assert written["problems"] == 2 and written["overrides"] == overrides
    assert json.loads((finished / "evaluations/step_000009.json").read_text())["problems"] == 4


def test_the_exported_adapter_is_the_best_checkpoints(finished):
    best = checkpoint.find(finished, "best")
    for file in (best / "adapter").iterdir():
        assert (finished / "adapter" / file.name).read_bytes() == file.read_bytes()


RULES = {
    "raising": ("def rule(sample):\n    raise RuntimeError('boom')", "boom"),
    "nothing": ("def rule(sample):\n    pass", "None"),
    "nan": ("def rule(sample):\n    return float('nan')", "nan"),
    "a_list": ("def rule(sample):\n    return [1.0, 0.0]", "list"),
    "leaving": ("import sys\ndef rule(sample):\n    sys.exit(0)", "SystemExit"),
    "writing": ("def rule(sample):\n    sample.problem.fields['n'] = 1\n    return 1.0", "mappingproxy"),
}


@pytest.mark.parametrize("kind", RULES)
def test_a_broken_rule_ends_the_run_naming_rule_and_completion(tmp_path, monkeypatch, kind):
    code, word = RULES[kind]
    (tmp_path / f"rule_{kind}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as error:
        train(tmp_path / "run", f"+reward.rules.mine.fn=rule_{kind}:rule")
    assert "mine" in str(error.value) and word in str(error.value) and "<think>" in str(error.value)
    assert runfolder.summary(tmp_path / "run")["status"] == "failed"
    assert "Traceback" in (tmp_path / "run/error.log").read_text()


def test_a_rule_of_ones_own_counts_with_its_weight(tmp_path, monkeypatch):
    (tmp_path / "short_rule.py").write_text("def rule(sample, scale):\n    return -scale * sample.tokens")
    monkeypatch.syspath_prepend(tmp_path)
    train(
        tmp_path / "run",
        "+reward.rules.short.fn=short_rule:rule",
        "+reward.rules.short.args.scale=0.1",
        "+reward.rules.short.weight=0.5",
        "steps=1",
    )
    (row,) = rows(tmp_path / "run", "metrics")
    expected = row["reward/rule/accuracy"] + 0.5 * row["reward/rule/format"] - 0.05 * row["completion/tokens"]
    assert row["reward/mean"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(OSError, match="closed"):
        train(tmp_path / "closed/run")


def test_a_policy_that_lost_its_numbers_ends_the_run_with_advice(tmp_path):
    with pytest.raises(ValueError, match=r"optimizer\.lr"):
        train(tmp_path, "optimizer.lr=1e30", "optimizer.warmup_steps=0")
    assert runfolder.summary(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(
    ("words", "bound", "advice"),
    [
        # A window of 128 leaves 28 tokens beside 100 new ones, 104 beside 24.
        (
            ["rollout.max_new_tokens=100"],
            "the 28 tokens that rollout.max_new_tokens=100 leaves of the model's window of 128",
            "tokens=50, or",
        ),
        (["data.max_prompt_tokens=30"], "data.max_prompt_tokens=30", "data.max_prompt_tokens=60, or"),
        (["data.max_prompt_tokens=104"], "data.max_prompt_tokens=104", "data.max_prompt_tokens=208, or"),
    ],
)
def test_prompts_left_out_are_told_with_the_limit_that_bound(model_folder, words, bound, advice):
    policy, cfg, notes = load_policy(model_section(model_folder), torch.device("cpu"), 1, Distribution(1.0)), config(*words), []
    short, long = Problem("a", "1+1=", "2"), Problem("b", "9" * 110, "0")
    assert [e.problem.id for e in grpo._encode(policy, [short, long], cfg, "training", notes)] == ["a"]
    assert notes == [f"1 of 2 training prompts are longer than {bound}: left out"]
    with pytest.raises(ValueError) as caught:
        grpo._encode(policy, [long], cfg, "held-out", [])
    assert f"no held-out prompt fits, all are longer than {bound}: try " in str(caught.value) and advice in str(caught.value)


def test_prompts_that_the_tokenizer_cannot_spell_are_counted():
    policy, notes = load_policy(model_section("asset:tiny"), torch.device("cpu"), 1, Distribution(1.0)), []
    assert len(grpo._encode(policy, [Problem("a", "1+1=", "2"), Problem("b", "1\u00c4+1=", "2")], config(), "training", notes)) == 2
    assert notes == ["1 of 2 training prompts hold characters unknown to the model's tokenizer"]


def test_adaptive_beta_is_steered_by_the_kl_of_whole_completions(tmp_path):
    # log beta moves by 0.5 (kl / target - 1), cut at 100 %; half a gain for an error of 50 %.
    train(tmp_path, "kl=adaptive", "kl.target=0.3", "kl.gain=0.5", "kl.beta=0.1", "optimizer.lr=3e-3", "optimizer.warmup_steps=0")
    steps = rows(tmp_path, "metrics")
    errors = [step["kl/sequence"] / 0.3 - 1 for step in steps]
    for step, error, after in zip(steps, errors, steps[1:], strict=False):
        moved = math.log(after["kl/beta"] / step["kl/beta"])
        assert moved == pytest.approx(0.5 * max(-1.0, min(1.0, error)), abs=1e-5)
    assert any(-0.9 < error < 0.9 for error in errors[:-1])


def test_a_context_window_too_small_is_told_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"rollout\.max_new_tokens"):
        train(tmp_path, "rollout.max_new_tokens=100000")
