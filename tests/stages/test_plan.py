"""grpo-plan: the text against the equations written out by hand, the table against arithmetic on paper, one config for each trap."""

import re
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
from models import kl_section

from grpo_cli import cli
from grpo_cli.compose import CONF, Composer, convert
from grpo_cli.config import KlSchedule
from grpo_cli.kl import BetaSchedule
from grpo_cli.stages import plan


@cache
def config(*overrides: str):
    with Composer(cli.PLAN, None, None) as composer:
        return convert(composer.compose(list(overrides)), list(overrides))


def entries(lines: list[str]) -> dict[str, str]:
    """Symbol -> text; a line without a symbol continues the one above."""
    found, symbol = {}, ""
    for line in lines:
        symbol, more = (line[:9].strip(), "") if line[0] != " " else (symbol, found[symbol] + " ")
        found[symbol] = more + line[9:].strip()
    return found


OFF = "dual clip, reference sync, entropy bonus, overlong masking, dynamic sampling, difficulty band"
DEFAULT = {
    "L": "= 1/64 sum_i 1/|o_i| sum_t [ -min(w A, clip(w, 0.8, 1.2) A) + 0.04 KL ]",
    "A": "= (r - mean(r)) / std(r), mean and std (n - 1) over the group of 8; 0 where all r are equal",
    "r": "= accuracy + 0.5 format",
    "rules": "accuracy: numeric(extract=answer_tag); format: r1_format",
    "w": "= pi / pi_old of each token; exactly 1 with one update per rollout, so the clip never acts",
    "KL": "k3 = exp(l) - 1 - l, l = log(pi_ref / pi) of each token; gradient: of the estimate as it stands",
    "pi_ref": "the policy at the start of the run",
    "off": OFF,
}
NO_KL = {"KL": None, "pi_ref": None}
TOKENS = {"M": "tokens trained on in the whole step, at most 4096"}
CONSTANT = {"C": "= 64 completions x 64 tokens (the most allowed)"}
STEPS = ["algorithm.advantage=process", "+reward.rules.steps.fn=working_steps", "+reward.rules.steps.kind=process"]


@pytest.mark.parametrize(
    ("overrides", "differs"),
    [
        ([], {}),
        (
            ["algorithm=dr_grpo", "kl=none"],
            {
                "L": "= 1/C sum_i sum_t [ -min(w A, clip(w, 0.8, 1.2) A) ]",
                "A": "= r - mean(r), over the group of 8",
                "off": "dual clip, KL penalty, reference sync, entropy bonus, overlong masking, dynamic sampling, difficulty band",
                **CONSTANT,
                **NO_KL,
            },
        ),
        (
            ["algorithm=dapo", "kl=none"],
            {
                "L": "= 1/M sum_i sum_t [ -min(w A, clip(w, 0.8, 1.28) A) ]",
                "groups": "all right or all wrong by accuracy are replaced, in at most 4 further rollouts a step; "
                "then the step trains on those it has",
                "off": "dual clip, KL penalty, reference sync, entropy bonus, overlong masking, difficulty band",
                **TOKENS,
                **NO_KL,
            },
        ),
        (
            ["algorithm=gspo", "algorithm.updates_per_rollout=4"],
            {
                "L": "= 1/64 sum_i 1/|o_i| sum_t [ -min(w A, clip(w, 0.9997, 1.0004) A) + 0.04 KL ]",
                "w": "= geometric mean over the completion of pi / pi_old; 1 at the first of 4 updates per rollout",
            },
        ),
        (
            ["algorithm=cispo"],
            {
                "L": "= 1/M sum_i sum_t [ -sg(min(w, 1.2)) A log pi + 0.04 KL ]",
                "w": "= pi / pi_old of each token; exactly 1 with one update per rollout, so the cap never acts",
                **TOKENS,
            },
        ),
        (
            ["algorithm=rloo"],
            {
                "L": "= 1/C sum_i sum_t [ -w A + 0.04 KL ]",
                "A": "= r - mean of the other 7 r of the group of 8",
                "w": "= pi / pi_old of each token; exactly 1 with one update per rollout",
                "off": f"clip, {OFF}",
                **CONSTANT,
            },
        ),
        (
            ["algorithm=reinforce_pp"],
            {
                "L": "= 1/M sum_i sum_t [ -min(w A, clip(w, 0.8, 1.2) A) + 0.04 KL ]",
                "A": "= (r - mean(r)) / std(r), mean and std (n - 1) over the 64 of the step",
                **TOKENS,
            },
        ),
        (["algorithm=grpo_rank"], {"A": "= 2 (rank(r) - mean rank) / 7 within the group of 8, ties sharing their mean rank"}),
        (
            ["algorithm=grpo_kl_only", "kl.anchor=old"],
            {
                "L": "= 1/64 sum_i 1/|o_i| sum_t [ -w A + 0.04 KL ]",
                "w": "= pi / pi_old of each token; 1 at the first of 2 updates per rollout",
                "KL": "k3 = exp(l) - 1 - l, l = log(pi_old / pi) of each token; gradient: of the estimate as it stands",
                "pi_ref": None,
                "off": f"clip, {OFF}",
            },
        ),
        (
            ["kl=linear", "kl.placement=reward", "kl.estimator=k1"],
            {
                "L": "= 1/64 sum_i 1/|o_i| sum_t [ -min(w A, clip(w, 0.8, 1.2) A) ]",
                "A": "= (r - mean(r)) / std(r), mean and std (n - 1) over the group of 8; 0 where all r are equal; "
                "then - beta (K - mean(K)), K = sum_t KL, over the group",
                "KL": "k1 = -l, l = log(pi_ref / pi_old) of each token; gradient: none, it is part of the reward",
                "beta": "0.04 at step 1, then in a line to 0 at step 100",
            },
        ),
        (
            ["kl=adaptive", "kl.warmup_steps=9", "kl.gradient=unbiased", "kl.sync_every=20", "kl.sync_alpha=0.6"],
            {
                "L": "= 1/64 sum_i 1/|o_i| sum_t [ -min(w A, clip(w, 0.8, 1.2) A) + beta (pi/pi_old) KL ]",
                "KL": "k3 = exp(l) - 1 - l, l = log(pi_ref / pi) of each token; gradient: of its mean over samples of pi",
                "beta": "from 0 up to 0.04 at step 10, then log beta moves by at most 0.1 a step to hold k3 to the reference, "
                "summed over a completion, at 0.5 nats; beta stays in 0.0001..10",
                "pi_ref": "the policy at the start of the run; every 20 steps it becomes 0.6 pi + 0.4 pi_ref, weight by weight",
                "off": "dual clip, entropy bonus, overlong masking, dynamic sampling, difficulty band",
            },
        ),
        (
            ["algorithm.dual_clip=3", "algorithm.entropy_bonus=0.01", "algorithm.truncated=mask", "kl.estimator=exact"],
            {
                "L": "= 1/N sum_i 1/|o_i| sum_t [ -max(min(w A, clip(w, 0.8, 1.2) A), 3 A if A < 0) + 0.04 KL - 0.01 H ]",
                "N": "completions trained on, at most 64",
                "KL": "exact = sum over the vocabulary of pi log(pi / pi_ref); gradient: of the estimate as it stands",
                "H": "entropy of pi over the whole vocabulary at each token (nats)",
                "cut": "completions cut at 64 tokens are not trained on; in r and A they count like the others",
                "off": "reference sync, dynamic sampling, difficulty band",
            },
        ),
        (
            ["algorithm.combine=normalise_first", "algorithm.std=population", "reward.rules.format.weight=-0.5"],
            {
                "A": "= a(accuracy) - 0.5 a(format)",
                "a(r)": "= (r - mean(r)) / std(r), mean and std (n) over the group of 8; 0 where all r are equal",
                "r": None,
            },
        ),
        (
            [*STEPS, "reward.rules.format.weight=0"],
            {
                "s": "= steps at the end of each step; accuracy at the last token",
                "rules": "accuracy: numeric(extract=answer_tag); format: r1_format (only measured); steps: working_steps",
                "A": "= sum of (s - mean(s)) / std(s) over its steps that end at t or later, mean and std (n - 1) over all steps "
                "of the group of 8; 0 where all s are equal",
                "r": None,
            },
        ),
        (
            ["data.difficulty=[0.2,0.8]"],
            {
                "problems": "pass rate in 0.2..0.8 or not known yet, or the nearest to it; a share of 0.05 from outside",
                "off": "dual clip, reference sync, entropy bonus, overlong masking, dynamic sampling",
            },
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_equation_is_the_one_written_by_hand(overrides, differs):
    expected = {symbol: text for symbol, text in (DEFAULT | differs).items() if text is not None}
    assert entries(plan.equation(config(*overrides))) == expected


def test_the_table_by_hand():
    # 512 + 64 = 576 tokens at the longest: 8192 // 576 = 14 rows, and 64 completions make ceil(64 / 14) = 5 micro-batches.
    # 100 steps of 64 completions of at most 64 tokens: 6400 and 409600. Rate: 1/5 of 1e-3 first, a tenth of it last.
    assert plan.table(config()) == [
        ("completions per step", "P 8 prompts x G 8 samples = 64, at temperature 1"),
        ("optimizer steps", "100 steps x 1 update per rollout = 100"),
        ("whole run", "6400 completions, at most 409600 completion tokens"),
        (
            "micro-batches",
            "8192 tokens each: 14 rows of the longest (512 + 64 tokens), at most 5 per update; fewer where the native path reads a "
            "prompt once for its group",
        ),
        ("learning rate", "0.0002 at optimizer step 1, 0.001 at 6 (after warm-up), 0.0001 at 100 (last); adamw, linear"),
        ("evaluations", "step 0, 20, 40, 60, 80, 100 (6): at most 256 problems x 4 samples, and greedy"),
        ("checkpoints", "step 0, 20, 40, 60, 80, 100 (6), and at a new best; kept: the newest 2 and the best"),
    ]


def test_the_table_of_a_larger_run_by_hand():
    # G 4 of 32: P 8. Up to 3 rollouts a step: 10 * 32 * 3 = 960 completions of 100 tokens. A row of 300 + 100 = 400 is over the
    # budget of 256, so it stands alone: 32 micro-batches. 10 * 2 = 20 optimizer steps. Evaluated at 0, 3, 6, 9, 10; saved at
    # 0, 1, 2, ..., 10 (11 times).
    words = ["steps=10", "group_size=g4", "group_size.completions_per_step=32", "rollout.max_new_tokens=100", "data.max_prompt_tokens=300"]
    words += [
        "algorithm.resample_tries=2",
        "algorithm.updates_per_rollout=2",
        "model.micro_batch_tokens=256",
        "eval_every=3",
        "save_every=1",
    ]
    rows = dict(plan.table(config(*words, "optimizer.schedule=constant", "optimizer.warmup_steps=0", "optimizer.lr=3e-4")))
    assert rows["completions per step"].startswith("P 8 prompts x G 4 samples = 32")
    assert rows["optimizer steps"] == "10 steps x 2 updates per rollout = 20"
    assert rows["whole run"] == "at most 960 completions, at most 96000 completion tokens"
    assert "1 row of the longest (300 + 100 tokens, over the budget), at most 32 per update" in rows["micro-batches"]
    assert rows["learning rate"] == "0.0003 at optimizer step 1, 0.0003 at 20 (last); adamw, constant"
    assert rows["evaluations"].startswith("step 0, 3, 6, 9, 10 (5)")
    assert rows["checkpoints"].startswith("step 0, 1, 2, ..., 10 (11)")


def test_steps_are_counted_and_not_listed():
    assert plan._points(20, 100) == "step 0, 20, 40, 60, 80, 100 (6)"
    assert plan._points(200, 100) == "step 0, 100 (2)"
    assert plan._points(1, 10**23) == f"step 0, 1, 2, ..., {10**23} ({10**23 + 1})"
    for every, steps in ((1, 1), (1, 5), (3, 10), (5, 10), (10, 10), (7, 50), (11, 10)):
        points = sorted({0, *range(every, steps + 1, every), steps})
        assert plan._points(every, steps).endswith(f" {points[-1]} ({len(points)})")


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "adaptive"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 0), (2, 1), (3, 1), (10, 0), (10, 3), (10, 8), (10, 9), (1000, 999)])
def test_the_plans_betas_are_those_of_the_schedule(schedule, steps, warmup):
    kl = kl_section(
        schedule=KlSchedule[schedule],
        beta=0.4,
        end_beta=0.1 if schedule in ("linear", "cosine") else None,
        target=1.0 if schedule == "adaptive" else None,
        warmup_steps=warmup,
    )
    beta = BetaSchedule(kl, steps)
    told = re.findall(r"([\d.e-]+) at step (\d+)", plan._schedule(kl, steps))
    assert told and [float(value) for value, _ in told] == pytest.approx([beta.at(int(step)) for _, step in told], rel=1e-5)
    reached = any(beta.at(step) == pytest.approx(0.4) for step in range(1, steps + 1))
    assert reached == ("never reached" not in plan._schedule(kl, steps))


def test_a_schedule_without_room_says_what_becomes_of_it():
    assert plan._schedule(config("kl=linear", "kl.warmup_steps=9", "steps=10").kl, 10) == (
        "from 0 up to 0.036 at step 9, then 0 at step 10; kl.beta is never reached"
    )
    assert plan._schedule(config("kl=linear", "steps=1").kl, 1) == "0 at step 1, the last; kl.beta is never reached"


OVERLONG = "+reward.rules.length={fn: overlong, args: {max_tokens: 64, buffer: 16}}"
TRAPS = [
    (["algorithm.aggregation=constant"], "try algorithm.advantage=group_mean"),
    (["group_size=g2"], "always +-0.707 or 0"),
    (["group_size=g2", "algorithm.std=population"], "always +-1 or 0"),
    (["algorithm=dr_grpo", "algorithm.combine=normalise_first"], "has nothing to normalise"),
    (["algorithm.advantage=process"], "without a rule of that kind is group_std"),
    ([*STEPS, "algorithm.advantage=group_std"], "sees only their mean: try algorithm.advantage=process"),
    ([OVERLONG, "algorithm.truncated=mask"], "penalised but not trained on"),
    ([OVERLONG, "rollout.max_new_tokens=48"], "no completion passes 48 tokens: try reward.rules.length.args.max_tokens=48"),
    (["algorithm.resample_tries=4"], "drops groups of equal accuracy, whatever their format: try reward.rules.format.weight=0"),
    (["reward=number", "reward.rules.accuracy.weight=0"], "every rule has weight 0"),
    (["algorithm.ratio=sequence", "algorithm.updates_per_rollout=2"], "try algorithm.clip_low=3e-4 algorithm.clip_high=4e-4"),
    (["algorithm.clip_high=0.001", "algorithm.updates_per_rollout=2"], "cuts off nearly every token that moves"),
    (["algorithm=grpo_kl_only"], "nothing holds the policy to the one that sampled"),
    (["kl.anchor=old"], "has gradient 0: try algorithm.updates_per_rollout=2"),
    (["kl.estimator=k1"], "mean gradient of 0 on the policy's own samples: try kl.gradient=unbiased"),
    (["kl=adaptive", "kl.anchor=old", "algorithm.updates_per_rollout=2"], "kl=adaptive steers by the KL to the reference"),
    (["kl=none", "kl.sync_every=10"], "moves a reference that no penalty uses"),
    (["optimizer.lr=1e-6"], "LoRA wants far more: try optimizer.lr=1e-4"),
    (["model.lora=null"], "model.lora=null trains all weights: try optimizer.lr=1e-5"),
    (["optimizer.warmup_steps=200"], "outlasts the 100 optimizer steps"),
    (["data.difficulty=[0.2,0.8]", "data.revisit=0", "data.train.limit=100"], "never tried again: try data.revisit=0.1"),
    (["data.difficulty=[0.2,0.8]"], "at most 800 of 8192 problems are drawn, none twice"),
    (["data.difficulty_map=somewhere"], "all problems are drawn alike"),
    (["algorithm.dual_clip=3"], "algorithm.dual_clip=3 never acts with one update per rollout"),
    (["algorithm.combine=normalise_first", "reward.rules.format.weight=0"], "only one rule with a weight"),
    (["data.difficulty=[0,1]"], "holds every problem"),
    (["data.eval.limit=64"], "evaluation on 64 problems x 4: standard error about 0.044"),
]


@pytest.mark.parametrize(("overrides", "words"), TRAPS, ids=[words[:40] for _, words in TRAPS])
def test_a_trap_is_named_once_and_says_what_to_type(overrides, words):
    (found,) = plan.warnings(config(*overrides))
    assert words in found and ": try " in found


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm=dr_grpo", "group_size=g2"],
        ["algorithm=gspo", "algorithm.updates_per_rollout=4"],
        ["algorithm=grpo_kl_only", "kl.anchor=old"],
        ["algorithm=dapo", "reward=number", "kl=none"],
        ["algorithm=rloo", "kl.placement=reward", "kl.estimator=k1"],
        ["kl.estimator=k1", "kl.gradient=unbiased"],
        ["kl.sync_every=10"],
        STEPS,
        [OVERLONG],
        ["data.difficulty=[0.2,0.8]", "data.train.limit=200"],
        ["data.difficulty=[0.2,0.8]", "data.difficulty_map=somewhere"],
        ["optimizer=sgd"],
        ["model.lora=null", "optimizer.lr=1e-5"],
    ],
    ids=" ".join,
)
def test_what_is_no_trap_gives_no_warning(overrides):
    assert plan.warnings(config(*overrides)) == []


def test_the_evaluation_warning_by_hand():
    # Variance 1/12 + 1/6/4 = 0.125: sqrt(0.125 / 139) = 0.02999 is fine, sqrt(0.125 / 138) = 0.0301 is not. The default's 256: 0.022.
    cfg = config("data.eval.limit=139")
    assert plan.warnings(cfg) == []
    (found,) = plan.warnings(replace(cfg, data=replace(cfg.data, eval=replace(cfg.data.eval, limit=138))))
    assert found.endswith("try data.eval.limit=139")


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))


@pytest.mark.parametrize("algorithm", options("algorithm"))
def test_every_preset_plans_with_every_kl(algorithm):
    preset = config(f"algorithm={algorithm}")
    for kl in options("kl"):
        text = plan.report(replace(preset, kl=config(f"kl={kl}").kl))
        assert max(map(len, text.splitlines())) <= 120
        assert ("KL penalty" in text) == (kl == "none")


def test_the_command_prints_the_report_without_torch_and_writes_nothing(tmp_path):
    code = """
import sys
from grpo_cli import cli
sys.argv = ["grpo-plan", "algorithm=dapo", "kl=none", "data.difficulty=[0.2,0.8]"]
try:
    cli.plan()
finally:
    print(sorted({"torch", "transformers", "peft", "wandb", "rich"} & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    report = plan.report(config("algorithm=dapo", "kl=none", "data.difficulty=[0.2,0.8]"))
    assert ended.stdout == f"{report}\n[]\n"
    assert list(tmp_path.iterdir()) == []


BROKEN = ["+reward.rules.o.fn=overlong", "+reward.rules.o.args.buffer=5"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-m", "kl.beta=0,1"], "grpo-plan runs no jobs"),
        (["kl.betta=1"], "did you mean kl.beta"),
        (["group_size.samples_per_prompt=1"], "a group of one has no advantage"),
        ([f"steps={10**23}"], "steps must be at most 10000000"),
        ([*BROKEN, "+reward.rules.o.args.max_tokens=abc"], "overlong needs numbers with 0 < buffer <= max_tokens, not max_tokens=abc"),
        ([*BROKEN, "+reward.rules.o.args.max_tokens=null"], "not max_tokens=None, buffer=5"),
        (BROKEN, "not max_tokens=None, buffer=5"),
        ([*BROKEN, "+reward.rules.o.weight=0"], "not max_tokens=None, buffer=5"),
        (["kl.beta=0,1"], "kl.beta=0,1 is a list of values, and grpo-plan shows one run: give one value"),
    ],
)
def test_mistakes_read_like_those_of_grpo_train(argv, words, capsys):
    assert cli._guarded(cli._show_plan, cli.PLAN, argv) == 1
    assert words in capsys.readouterr().err


def test_a_recipe_and_help_are_shown(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [grpo, _self_]\nsteps: 7\n")
    assert cli._guarded(cli._show_plan, cli.PLAN, ["-cd", str(tmp_path), "-cn", "mine"]) == 0
    assert "7 steps x 1 update per rollout = 7" in capsys.readouterr().out
    assert cli._guarded(cli._show_plan, cli.PLAN, ["--help"]) == 0
    assert "grpo-plan algorithm=dapo kl=none" in capsys.readouterr().out


def test_the_first_problems_are_shown_with_their_golds(tmp_path):
    shown = plan.first_problems(config().data)
    assert len(shown) == 3 and all(re.fullmatch(r"(\d+)\+(\d+)=   \[gold: \d+\]", line) for line in shown)
    assert plan.first_problems(config("data=gsm8k").data) == ["those of openai/gsm8k on the hub, which is not read here"]
    (tmp_path / "rows.jsonl").write_text('{"question": "how\\nmany? %s", "answer": "3"}\n' % ("x" * 500))
    rows = config("data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}", f"data.eval.path={tmp_path / 'other.jsonl'}")
    (tmp_path / "other.jsonl").write_text('{"question": "?", "answer": "4"}\n')
    (line,) = plan.first_problems(rows.data)
    assert line.startswith("how many? xxx") and "... " in line and line.endswith("[gold: 3]") and len(line) < 330
