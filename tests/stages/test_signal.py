"""Dynamic sampling, the difficulty band and reference sync, in whole runs."""

import json

import pytest
from runs import dies, kill_on_call, numbers, rows, train

from grpo_cli.stages import grpo


def always(sample, extract):
    return 1.0


def never(sample, extract):
    return 0.0


@pytest.mark.parametrize(("rule", "word"), [("always", "too easy"), ("never", "too hard")])
def test_dynamic_sampling_on_data_without_signal_ends_with_a_message(tmp_path, rule, word):
    words = [f"reward.rules.accuracy.fn=test_signal:{rule}", "algorithm.resample_tries=3"]
    summary = train(tmp_path, *words)
    assert summary["status"] == "stopped" and word in summary["reason"] and summary["step"] == 0
    assert "4 rollouts" in summary["reason"] and "8 all" in summary["reason"]  # 2 groups in each of 1 + 3 rollouts


def test_dynamic_sampling_trains_on_mixed_groups_only_and_counts_the_dropped(tmp_path):
    train(tmp_path, "algorithm.resample_tries=8", "steps=4")
    for step in rows(tmp_path, "metrics"):
        groups = [row for row in rows(tmp_path, "groups") if row["step"] == step["step"]]
        assert all(row["verdict"] == "mixed" for row in groups)
        dropped = step["group/dropped_all_right"] + step["group/dropped_all_wrong"]
        assert 1 <= step["group/rollouts"] <= 9 and len(groups) <= 2
        assert (dropped > 0) or step["group/rollouts"] == 1
    drawn = [row["problem"] for row in rows(tmp_path, "groups")]
    assert len(drawn) == len(set(drawn))


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm.resample_tries=4"],
        ["kl.sync_every=3", "kl.sync_alpha=0.5", "optimizer.lr=3e-3"],
        ["data.difficulty=[0.1,0.9]", "data.train.limit=4"],
        ["kl=adaptive", "kl.target=0.01", "kl.warmup_steps=2"],
        ["model.lora=null", "kl.sync_every=4", "optimizer.lr=3e-4"],
        [
            "algorithm.advantage=process",
            "+reward.rules.working.fn=working_steps",
            "+reward.rules.working.kind=process",
            "kl.estimator=exact",
        ],
    ],
    ids=["dynamic sampling", "reference sync", "difficulty", "adaptive", "full sync", "process and exact"],
)
def test_every_kind_of_state_resumes_exactly(tmp_path, words):
    train(tmp_path / "whole", *words)
    dies(tmp_path / "killed", kill_on_call(grpo, "improve", 7), *words)
    train(tmp_path / "killed", *words, "resume=auto")
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    assert (tmp_path / "killed/difficulty.json").read_text() == (tmp_path / "whole/difficulty.json").read_text()


@pytest.mark.parametrize("lora", [[], ["model.lora=null", "optimizer.lr=1e-3"]], ids=["lora", "full"])
def test_the_kl_drops_to_zero_at_a_sync(tmp_path, lora):
    train(tmp_path, "kl.sync_every=4", "optimizer.lr=5e-3", "optimizer.schedule=constant", *lora)
    kl = {row["step"]: row["kl/sequence"] for row in rows(tmp_path, "metrics")}
    assert kl[4] > 1e-3 and kl[8] > 1e-3
    assert kl[5] < 1e-6 and kl[9] < 1e-6


def test_the_map_of_a_run_is_in_its_folder_and_starts_another(tmp_path):
    train(tmp_path / "first", "data.train.limit=4")
    first = json.loads((tmp_path / "first/difficulty.json").read_text())
    assert len(first) == 4 and all(0 <= entry["rate"] <= 1 for entry in first.values())
    assert sum(entry["tried"] for entry in first.values()) == 9 * 8
    hard = {name: entry | {"rate": 0.0} for name, entry in first.items()}
    chosen = sorted(hard)[:2]
    for name in chosen:
        hard[name]["rate"] = 0.5
    (tmp_path / "map.json").write_text(json.dumps(hard))
    words = ["data.train.limit=4", "data.difficulty=[0.2,0.8]", "data.revisit=0", f"data.difficulty_map={tmp_path / 'map.json'}", "steps=1"]
    train(tmp_path / "second", *words)
    assert sorted(row["problem"] for row in rows(tmp_path / "second", "groups")) == chosen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kl_in_the_reward_is_zero_while_policy_and_reference_are_equal(tmp_path, dtype):
    words = ["steps=1", "algorithm=dr_grpo", f"model.dtype={dtype}", "kl.placement=reward", "kl.estimator=k1"]
    train(tmp_path / "off", *words, "kl.beta=0")
    train(tmp_path / "on", *words, "kl.beta=5")
    off, on = (rows(tmp_path / name, "metrics")[0] for name in ("off", "on"))
    assert on["optim/grad_norm"] == pytest.approx(off["optim/grad_norm"], rel=1e-4)


def test_kl_in_the_reward_lowers_the_advantage_and_not_the_logged_reward(tmp_path):
    train(tmp_path, "kl.placement=reward", "kl.estimator=k1", "kl.beta=0.5", "optimizer.lr=5e-3")
    for step in rows(tmp_path, "metrics"):
        own = [row for row in rows(tmp_path, "groups") if row["step"] == step["step"]]
        assert step["reward/mean"] == pytest.approx(sum(sum(g["rewards"]) for g in own) / 8, abs=1e-6)
        assert all(reward in (0.0, 0.5, 1.0, 1.5) for g in own for reward in g["rewards"])
    assert rows(tmp_path, "metrics")[-1]["kl/sequence"] > 0
