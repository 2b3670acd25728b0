"""What a run will do, told before it starts: the equation it optimises, its batch table, its first problems, and warnings for known traps.

Loads no model and no torch. Every line here follows from what advantages, losses, kl, update, collect and optim do: change them together.
"""

import math
import textwrap
from collections.abc import Iterator
from dataclasses import replace

from grpo_cli.config import (
    Advantage,
    Aggregation,
    Algorithm,
    Anchor,
    Clip,
    Combine,
    Control,
    Data,
    Engine,
    Estimator,
    GrpoRun,
    Kl,
    KlGradient,
    KlSchedule,
    OptimizerName,
    Placement,
    Ratio,
    Rule,
    RuleKind,
    Source,
    Std,
    Truncated,
)
from grpo_cli.data import is_hub_id, load_problems
from grpo_cli.optim import lr_factor
from grpo_cli.rewards.rules import check_overlong

WIDTH = 118

_SHOWN = 3
_LONGEST_SHOWN = 300

LARGEST_ERROR = 0.03
"""Standard error of an accuracy beyond which arms of a sweep can hardly be told apart."""


def report(cfg: GrpoRun) -> str:
    """All of it, as grpo-plan prints it."""
    rows = [line for label, text in table(cfg) for line in _wrapped(label, 21, text)]
    warned = [line for text in warnings(cfg) for line in _wrapped("-", 2, text)]
    title = "The loss of every optimizer step (i: completions, t: their tokens; pi_old sampled them; sg: no gradient)"
    shown = [line for text in first_problems(cfg.data) for line in _wrapped("-", 2, text)]
    parts = [title, "", *equation(cfg), "", "The run", "", *rows, "", "The first problems", "", *shown, ""]
    return "\n".join([*parts, *(["Warnings", "", *warned] if warned else ["No warnings."])])


def _wrapped(label: str, indent: int, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=label.ljust(indent), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


# --- the equation ------------------------------------------------------------------------------------------------------


def equation(cfg: GrpoRun) -> list[str]:
    """The loss, then one entry for each of its symbols, then what is off."""
    algorithm, kl = cfg.algorithm, cfg.kl
    masked, in_loss = algorithm.truncated is Truncated.mask, _penalised(kl) and kl.placement is Placement.loss
    B, T = cfg.group_size.completions_per_step, cfg.rollout.max_new_tokens
    N = "N" if masked or algorithm.resample_tries else str(B)
    low, high = cfg.data.difficulty or (0, 1)
    outer = {
        Aggregation.sequence_mean: f"1/{N} sum_i 1/|o_i| sum_t",
        Aggregation.token_mean: "1/M sum_i sum_t",
        Aggregation.constant: "1/C sum_i sum_t",
    }[algorithm.aggregation]
    penalty = f" + {_beta(kl)} {'(pi/pi_old) ' if kl.gradient is KlGradient.unbiased else ''}KL" if in_loss else ""
    entropy = f" - {algorithm.entropy_bonus:g} H" if algorithm.entropy_bonus else ""
    entries = {
        "L": f"= {outer} [ -{_policy_part(algorithm)}{penalty}{entropy} ]",
        **_rewards(cfg),
        "w": _ratio(algorithm),
        "N": f"completions trained on, at most {B}" if N == "N" and algorithm.aggregation is not Aggregation.token_mean else "",
        "M": f"tokens trained on in the whole step, at most {B * T}" if algorithm.aggregation is Aggregation.token_mean else "",
        "C": f"= {N} completions x {T} tokens (the most allowed)" if algorithm.aggregation is Aggregation.constant else "",
        "KL": _kl(kl) if _penalised(kl) else "",
        "beta": _schedule(kl, cfg.steps) if _penalised(kl) and _beta(kl) == "beta" else "",
        "pi_ref": _reference(kl) if _penalised(kl) and kl.anchor is Anchor.reference else "",
        "H": "entropy of pi over the whole vocabulary at each token (nats)" if entropy else "",
        "cut": f"completions cut at {T} tokens are not trained on; in r and A they count like the others" if masked else "",
        "groups": f"all right or all wrong by {cfg.reward.accuracy} are replaced, in at most {algorithm.resample_tries} further rollouts a "
        "step; then the step trains on those it has"
        if algorithm.resample_tries
        else "",
        "problems": f"pass rate in {low:g}..{high:g} or not known yet, or the nearest to it; a share of {cfg.data.revisit:g} from outside"
        if cfg.data.difficulty
        else "",
    }
    off = {
        "clip": algorithm.clip is Clip.none,
        "dual clip": algorithm.dual_clip is None,
        "KL penalty": not _penalised(kl),
        "reference sync": kl.sync_every is None,
        "entropy bonus": not entropy,
        "overlong masking": not masked,
        "dynamic sampling": not algorithm.resample_tries,
        "difficulty band": cfg.data.difficulty is None,
    }
    entries["off"] = ", ".join(name for name, is_off in off.items() if is_off)
    return [line for symbol, text in entries.items() if text for line in _wrapped(symbol, 9, text)]


def _policy_part(algorithm: Algorithm) -> str:
    low, high = f"{1 - algorithm.clip_low:g}", f"{1 + algorithm.clip_high:g}"
    if algorithm.clip is Clip.cispo:
        return f"sg(min(w, {high})) A log pi"
    if algorithm.clip is Clip.none:
        return "w A"
    clipped = f"min(w A, clip(w, {low}, {high}) A)"
    return clipped if algorithm.dual_clip is None else f"max({clipped}, {algorithm.dual_clip:g} A if A < 0)"


def _ratio(algorithm: Algorithm) -> str:
    what = "geometric mean over the completion of pi / pi_old" if algorithm.ratio is Ratio.sequence else "pi / pi_old of each token"
    idle = {Clip.ppo: ", so the clip never acts", Clip.cispo: ", so the cap never acts", Clip.none: ""}[algorithm.clip]
    mu = algorithm.updates_per_rollout
    return f"= {what}; " + (f"exactly 1 with one update per rollout{idle}" if mu == 1 else f"1 at the first of {mu} updates per rollout")


def _rewards(cfg: GrpoRun) -> dict[str, str]:
    """Entries for the reward and the advantage."""
    algorithm, rules = cfg.algorithm, cfg.reward.rules
    cost = _beta(cfg.kl) if _penalised(cfg.kl) and cfg.kl.placement is Placement.reward else None
    paid = {name: rule for name, rule in rules.items() if rule.weight}
    named = [f"{name}: {_call(rule)}{'' if rule.weight else ' (only measured)'}" for name, rule in rules.items()]
    if algorithm.advantage is Advantage.process:
        parts = [
            (_weighted({name: rule.weight for name, rule in paid.items() if rule.kind is kind}), where)
            for kind, where in ((RuleKind.process, "at the end of each step"), (RuleKind.outcome, "at the last token"))
        ]
        later = f", minus {cost} x the sum of KL from t to the end" if cost else ""
        over = f"sum of (s - mean(s)) / std(s) over its steps that end at t or later, mean and {_std('std', algorithm.std)} over all steps"
        return {
            "s": "= " + "; ".join(f"{formula} {where}" for formula, where in parts if formula != "0"),
            "rules": "; ".join(named),
            "A": f"= {over} of the group of {cfg.group_size.samples_per_prompt}; 0 where all s are equal{later}",
        }
    as_one = {name if rule.kind is RuleKind.outcome else f"mean({name})": rule.weight for name, rule in paid.items()}
    formula = _outcome(algorithm, cfg.group_size.samples_per_prompt, cfg.group_size.completions_per_step)
    later = f"; then - {cost} (K - mean(K)), K = sum_t KL, over the group" if cost else ""
    if algorithm.combine is Combine.normalise_first:
        summed = _weighted({f"a({name})": weight for name, weight in as_one.items()})
        return {"A": f"= {summed}{later}", "a(r)": f"= {formula}", "rules": "; ".join(named)}
    return {"A": f"= {formula}{later}", "r": f"= {_weighted(as_one)}", "rules": "; ".join(named)}


def _outcome(algorithm: Algorithm, G: int, B: int) -> str:
    std, step = _std("std", algorithm.std), f"the {'at most ' if algorithm.resample_tries else ''}{B} of the step"
    group = f"the group of {G}"
    return {
        Advantage.group_std: f"(r - mean(r)) / std(r), mean and {std} over {group}; 0 where all r are equal",
        Advantage.group_mean: f"r - mean(r), over {group}",
        Advantage.leave_one_out: f"r - mean of the other {G - 1} r of {group}",
        Advantage.batch_std: f"(r - mean(r)) / std(r), mean over {group}, {std} over {step}",
        Advantage.reinforce_pp: f"(r - mean(r)) / std(r), mean and {std} over {step}",
        Advantage.reinforce_pp_baseline: f"d / std(d), d = r - mean(r) over {group}, {std} over {step}",
        Advantage.rank: f"2 (rank(r) - mean rank) / {G - 1} within {group}, ties sharing their mean rank",
    }[algorithm.advantage]


def _std(word: str, std: Std) -> str:
    return f"{word} (n - 1)" if std is Std.sample else f"{word} (n)"


def _call(rule: Rule) -> str:
    args = ", ".join(f"{name}={value}" for name, value in rule.args.items())
    return f"{rule.fn}({args})" if args else rule.fn


def _weighted(weights: dict[str, float]) -> str:
    """accuracy + 0.5 format - 0.1 length"""
    terms = [(("- " if w < 0 else "+ ") + ("" if abs(w) == 1 else f"{abs(w):g} ") + name) for name, w in weights.items() if w]
    return " ".join(terms).removeprefix("+ ") or "0"


def _penalised(kl: Kl) -> bool:
    """Whether beta is above 0 at any step."""
    return kl.beta > 0 or (kl.schedule in (KlSchedule.linear, KlSchedule.cosine) and kl.end_beta > 0)


def _beta(kl: Kl) -> str:
    return f"{kl.beta:g}" if kl.schedule is KlSchedule.constant and not kl.warmup_steps else "beta"


def _kl(kl: Kl) -> str:
    now = "pi_old" if kl.placement is Placement.reward else "pi"
    anchor = "pi_old" if kl.anchor is Anchor.old else "pi_ref"
    what = {
        Estimator.k1: "k1 = -l",
        Estimator.k2: "k2 = l^2 / 2",
        Estimator.k3: "k3 = exp(l) - 1 - l",
        Estimator.symmetric: "symmetric = (exp(l) - 1) l / 2",
        Estimator.exact: f"exact = sum over the vocabulary of {now} log({now} / {anchor})",
    }[kl.estimator]
    where = "" if kl.estimator is Estimator.exact else f", l = log({anchor} / {now}) of each token"
    pull = "of the estimate as it stands" if kl.gradient is KlGradient.plain else "of its mean over samples of pi"
    return f"{what}{where}; gradient: {'none, it is part of the reward' if kl.placement is Placement.reward else pull}"


def _schedule(kl: Kl, steps: int) -> str:
    start = f"from 0 up to {kl.beta:g} at step {kl.warmup_steps + 1}, then " if kl.warmup_steps else f"{kl.beta:g} at step 1, then "
    if kl.schedule is KlSchedule.adaptive:
        return (
            f"{start}log beta moves by at most {kl.gain:g} a step to hold k3 to the reference, summed over a completion, at {kl.target:g} "
            f"nats; beta stays in {kl.min_beta:g}..{kl.max_beta:g}"
        )
    if kl.schedule is KlSchedule.constant:
        return f"{start}constant"
    way = "in a line" if kl.schedule is KlSchedule.linear else "along half a cosine"
    if steps == 1:
        return f"{kl.end_beta:g} at step 1, the last; kl.beta is never reached"
    if kl.warmup_steps + 1 >= steps:
        reached = f"from 0 up to {kl.beta * kl.warmup_steps / (kl.warmup_steps + 1):g} at step {kl.warmup_steps}"
        return f"{reached}, then {kl.end_beta:g} at step {steps}; kl.beta is never reached"
    return f"{start}{way} to {kl.end_beta:g} at step {steps}"


def _reference(kl: Kl) -> str:
    mixed = "pi" if kl.sync_alpha == 1 else f"{kl.sync_alpha:g} pi + {1 - kl.sync_alpha:g} pi_ref, weight by weight"
    return "the policy at the start of the run" + (f"; every {kl.sync_every} steps it becomes {mixed}" if kl.sync_every else "")


# --- the batch table ---------------------------------------------------------------------------------------------------


def table(cfg: GrpoRun) -> list[tuple[str, str]]:
    """(label, figures) of everything that is derived from the budget."""
    P, G, B = cfg.group_size.prompts_per_step, cfg.group_size.samples_per_prompt, cfg.group_size.completions_per_step
    T, mu, tries = cfg.rollout.max_new_tokens, cfg.algorithm.updates_per_rollout, cfg.algorithm.resample_tries
    updates, budget = cfg.steps * mu, cfg.model.micro_batch_tokens
    longest = cfg.data.max_prompt_tokens + T
    rows = max(1, budget // longest)
    completions = cfg.steps * B * (1 + tries)
    eval_n, again = cfg.data.eval.limit, cfg.evaluation.samples_per_problem
    problems = f"{'all' if eval_n is None else f'at most {eval_n}'} problems x {again} samples, and greedy"
    return [
        ("completions per step", f"P {P} prompts x G {G} samples = {B}, at temperature {cfg.rollout.temperature:g}"),
        ("optimizer steps", f"{cfg.steps} steps x {mu} update{'s' if mu > 1 else ''} per rollout = {updates}"),
        ("whole run", f"{'at most ' if tries else ''}{completions} completions, at most {completions * T} completion tokens"),
        (
            "micro-batches",
            f"{budget} tokens each: {rows} row{'s' if rows > 1 else ''} of the longest ({longest - T} + {T} tokens"
            f"{', over the budget' if longest > budget else ''}), at most {math.ceil(B / rows)} per update"
            f"{'; fewer where the native path reads a prompt once for its group' if cfg.rollout.engine is Engine.native else ''}",
        ),
        ("learning rate", _learning_rate(cfg, updates)),
        ("evaluations", f"{_points(cfg.eval_every, cfg.steps)}: {problems}"),
        ("checkpoints", f"{_points(cfg.save_every, cfg.steps)}, and at a new best; kept: the newest {cfg.keep_checkpoints} and the best"),
    ]


def _learning_rate(cfg: GrpoRun, updates: int) -> str:
    section = cfg.optimizer
    warm = section.warmup_steps
    named = {0: "optimizer step 1"} | ({warm: f"{warm + 1} (after warm-up)"} if 0 < warm < updates else {})
    named.setdefault(updates - 1, f"{updates} (last)")
    rates = ", ".join(f"{section.lr * lr_factor(index, section, updates):g} at {name}" for index, name in named.items())
    return f"{rates}; {section.name.name}, {section.schedule.name}"


def _points(every: int, steps: int) -> str:
    """step 0, 20, ..., 100 (6)"""
    count = 2 + (steps - 1) // every  # steps itself is always one of them
    shown = [*range(0, steps, every), steps] if count <= 6 else [0, every, 2 * every, "...", steps]
    return f"step {', '.join(map(str, shown))} ({count})"


# --- problems ----------------------------------------------------------------------------------------------------------


def first_problems(data: Data) -> list[str]:
    """The first three training prompts with their gold answers; a hub data set is not fetched for this."""
    if data.source is Source.rows and is_hub_id(data.path):
        return [f"those of {data.path} on the hub, which is not read here"]
    if data.source is not Source.rows:
        data = replace(data, train=replace(data.train, limit=_SHOWN), eval=replace(data.eval, limit=1))
    problems, _, notes = load_problems(data)
    texts = [(p.prompt if isinstance(p.prompt, str) else p.prompt[-1]["content"], p.answer) for p in problems[:_SHOWN]]
    return [f"{_short(prompt)}   [gold: {_short(gold) or 'none'}]" for prompt, gold in texts] + notes


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 4]} ..."


# --- warnings ----------------------------------------------------------------------------------------------------------


def warnings(cfg: GrpoRun) -> list[str]:
    """What is legal and yet rarely meant, each with the reason and the override to type."""
    algorithm = cfg.algorithm
    return [
        *_reward_traps(cfg),
        *_advantage_traps(cfg),
        *_clip_traps(algorithm, cfg.kl),
        *_kl_traps(algorithm, cfg.kl),
        *_budget_traps(cfg),
    ]


def _reward_traps(cfg: GrpoRun) -> Iterator[str]:
    if cfg.reward.control is not Control.none:
        here = f"reward.control={cfg.reward.control.name}: the run trains on a meaningless reward in place of r"
        yield f"{here}, to be compared with a real one: try reward.control=none"
    algorithm, T, right = cfg.algorithm, cfg.rollout.max_new_tokens, cfg.reward.accuracy
    paid = {name: rule for name, rule in cfg.reward.rules.items() if rule.weight}
    shaping = [name for name in paid if name != right]
    if not paid:
        yield f"every rule has weight 0, so all rewards are equal: try reward.rules.{right}.weight=1"
    if algorithm.resample_tries and shaping:
        here, off = f"algorithm.resample_tries={algorithm.resample_tries}", " ".join(f"reward.rules.{name}.weight=0" for name in shaping)
        yield f"{here} drops groups of equal {right}, whatever their {', '.join(shaping)}: try {off} or algorithm.resample_tries=0"
    for name, rule in cfg.reward.rules.items():
        if rule.fn == "overlong":
            check_overlong(f"reward.rules.{name}", rule.args)
    for name, rule in paid.items():
        key, steps = f"reward.rules.{name}", rule.kind is RuleKind.process
        if steps and algorithm.advantage is not Advantage.process:
            here = f"{key} judges steps, and algorithm.advantage={algorithm.advantage.name}"
            yield f"{here} sees only their mean: try algorithm.advantage=process"
        if rule.fn == "overlong" and algorithm.truncated is Truncated.mask:
            here = f"algorithm.truncated=mask with {key}: cut completions are penalised but not trained on"
            yield f"{here}, so the penalty only lifts the rest of their group: try algorithm.truncated=keep"
        if rule.fn == "overlong" and rule.args["max_tokens"] - rule.args["buffer"] >= T:
            yield f"{key} punishes beyond max_tokens - buffer, and no completion passes {T} tokens: try {key}.args.max_tokens={T}"


def _advantage_traps(cfg: GrpoRun) -> Iterator[str]:
    algorithm, G, rules = cfg.algorithm, cfg.group_size.samples_per_prompt, cfg.reward.rules.values()
    scaled, process = algorithm.advantage is Advantage.group_std, algorithm.advantage is Advantage.process
    if scaled and algorithm.aggregation is Aggregation.constant:
        here = "algorithm.advantage=group_std with aggregation=constant takes out the length bias and keeps that of std"
        yield f"{here} (nearly solved and nearly hopeless groups weigh most): try algorithm.advantage=group_mean"
    if scaled and G == 2:
        edge = "0.707" if algorithm.std is Std.sample else "1"
        yield f"algorithm.advantage=group_std with G=2 is always +-{edge} or 0, whatever the rewards: try group_size=g4"
    if algorithm.combine is Combine.normalise_first and algorithm.advantage in (Advantage.group_mean, Advantage.leave_one_out):
        here = f"algorithm.combine=normalise_first has nothing to normalise with advantage={algorithm.advantage.name}"
        yield f"{here}: try algorithm.advantage=group_std or algorithm.combine=weigh_first"
    if algorithm.combine is Combine.normalise_first and sum(rule.weight != 0 for rule in rules) == 1:
        here = "algorithm.combine=normalise_first has only one rule with a weight, so there are no scales to keep apart"
        yield f"{here}: try algorithm.combine=weigh_first"
    if process and not any(rule.weight and rule.kind is RuleKind.process for rule in rules):
        add = "+reward.rules.steps.fn=working_steps +reward.rules.steps.kind=process"
        yield f"algorithm.advantage=process without a rule of that kind is group_std: try algorithm.advantage=group_std or {add}"


def _clip_traps(algorithm: Algorithm, kl: Kl) -> Iterator[str]:
    mu, low, high = algorithm.updates_per_rollout, algorithm.clip_low, algorithm.clip_high
    acts = algorithm.clip is Clip.ppo and mu > 1
    if algorithm.dual_clip is not None and mu == 1:
        here = f"algorithm.dual_clip={algorithm.dual_clip:g} never acts with one update per rollout, where w is 1"
        yield f"{here}: try algorithm.updates_per_rollout=2 or algorithm.dual_clip=null"
    if acts and algorithm.ratio is Ratio.sequence and max(low, high) >= 0.1:
        here = f"algorithm.ratio=sequence with a clip of {max(low, high):g}: a mean over tokens moves far less, so it hardly acts"
        yield f"{here}: try algorithm.clip_low=3e-4 algorithm.clip_high=4e-4"
    if acts and algorithm.ratio is Ratio.token and min(low, high) < 0.01:
        here = f"algorithm.ratio=token with a clip of {min(low, high):g} cuts off nearly every token that moves"
        yield f"{here}: try algorithm.clip_low=0.2 algorithm.clip_high=0.2"
    if mu > 1 and algorithm.clip is Clip.none and not (_penalised(kl) and kl.anchor is Anchor.old):
        here = f"algorithm.clip=none with {mu} updates per rollout: nothing holds the policy to the one that sampled"
        yield f"{here}: try kl.anchor=old or algorithm.clip=ppo"


def _kl_traps(algorithm: Algorithm, kl: Kl) -> Iterator[str]:
    on, unbiased, estimator = _penalised(kl), kl.gradient is KlGradient.unbiased, kl.estimator
    if kl.schedule is KlSchedule.adaptive and kl.anchor is Anchor.old:
        yield "kl=adaptive steers by the KL to the reference, and kl.anchor=old penalises another one: try kl.anchor=reference"
    if kl.sync_every and not (on and kl.anchor is Anchor.reference):
        yield f"kl.sync_every={kl.sync_every} moves a reference that no penalty uses, only the measured KL: try kl.sync_every=null"
    if not on:
        return
    if kl.placement is Placement.reward:
        return
    if kl.anchor is Anchor.old and algorithm.updates_per_rollout == 1:
        here = f"kl.anchor=old with one update per rollout has gradient 0{' in the mean' if estimator is Estimator.k1 else ''}"
        yield f"{here}: try algorithm.updates_per_rollout=2 or kl.anchor=reference"
    if estimator is Estimator.k1 and not unbiased:
        yield "kl.estimator=k1 with gradient=plain has a mean gradient of 0 on the policy's own samples: try kl.gradient=unbiased"


def _budget_traps(cfg: GrpoRun) -> Iterator[str]:
    optimizer, data, lora = cfg.optimizer, cfg.data, cfg.model.lora is not None
    lr, updates = f"optimizer.lr={optimizer.lr:g}", cfg.steps * cfg.algorithm.updates_per_rollout
    if optimizer.name is not OptimizerName.sgd and lora and optimizer.lr < 5e-6:
        yield f"{lr} is meant for full fine-tuning, and LoRA wants far more: try optimizer.lr=1e-4"
    if optimizer.name is not OptimizerName.sgd and not lora and optimizer.lr > 1e-4:
        yield f"{lr} is meant for LoRA, and model.lora=null trains all weights: try optimizer.lr=1e-5"
    if optimizer.warmup_steps > updates:
        here = f"optimizer.warmup_steps={optimizer.warmup_steps} outlasts the {updates} optimizer steps"
        yield f"{here}, {lr} is never reached: try optimizer.warmup_steps={updates // 10}"
    banded = bool(data.difficulty) and list(data.difficulty) != [0, 1]
    if data.difficulty and not banded:
        yield "data.difficulty=[0,1] holds every problem, so none is passed over: try 'data.difficulty=[0.2,0.8]' or data.difficulty=null"
    if banded and data.revisit == 0:
        yield "data.revisit=0: a problem that left the band of data.difficulty is never tried again: try data.revisit=0.1"
    if data.difficulty_map and not data.difficulty:
        yield "data.difficulty_map without data.difficulty: all problems are drawn alike: try 'data.difficulty=[0.2,0.8]'"
    draws = cfg.steps * cfg.group_size.prompts_per_step * (1 + cfg.algorithm.resample_tries)
    if banded and not data.difficulty_map and (problems := _training_problems(data)) >= draws:
        here = f"data.difficulty: at most {draws} of {problems} problems are drawn, none twice, so the band never acts"
        yield f"{here}: try data.train.limit={max(1, draws // 4)} or data.difficulty_map=RUN_FOLDER"
    # If pass rates were spread evenly over 0..1: variance 1/12 between problems, 1/6 within one.
    n, samples = data.eval.limit, cfg.evaluation.samples_per_problem
    variance = 1 / 12 + 1 / 6 / samples
    if n and math.sqrt(variance / n) > LARGEST_ERROR:
        here = f"evaluation on {n} problems x {samples}: standard error about {math.sqrt(variance / n):.2g}"
        yield f"{here}, too coarse to tell two runs apart: try data.eval.limit={math.ceil(variance / LARGEST_ERROR**2)}"


def _training_problems(data: Data) -> int:
    """How many there are: counted for a generator, at most so many for rows; 0 where only reading them would tell."""
    return (data.train.limit or 0) if data.source is Source.rows else len(load_problems(data)[0])
