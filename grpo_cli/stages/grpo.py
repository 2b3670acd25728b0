"""The GRPO run: assemble the pieces, then sample, score, weigh, improve, until the budget is spent or there is a reason to stop."""

import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from grpo_cli import checkpoint
from grpo_cli.advantages import all_equal, group_relative, group_spread
from grpo_cli.batch import collate, to_device
from grpo_cli.config import GrpoRun, KlSchedule
from grpo_cli.data import load_problems
from grpo_cli.evaluation import evaluate
from grpo_cli.kl import BetaSchedule
from grpo_cli.optim import build_optimizer
from grpo_cli.policy import Policy, load_policy
from grpo_cli.randomness import permutation, uniforms
from grpo_cli.records import EncodedProblem, Ended, Group, Scores
from grpo_cli.rewards import load_rules, score
from grpo_cli.rollout import sample
from grpo_cli.runfolder import RunFolder
from grpo_cli.runfolder import reason as why
from grpo_cli.runtime import Interrupts, peak_memory_gib, pick_device, use_threads, versions
from grpo_cli.tracking import Tracker
from grpo_cli.update import Update, improve


@dataclass
class Progress:
    """What a checkpoint keeps of the loop itself."""

    step: int = 0
    cursor: int = 0
    """Prompts drawn so far; the order is a function of (seed, cursor)."""
    tokens: int = 0
    seconds: float = 0.0
    evaluations: dict[str, dict] = field(default_factory=dict)
    """The first, best and last evaluation, each with its step."""
    since_best: int = 0
    wandb_id: str = ""
    beta: dict = field(default_factory=dict)


def run(cfg: GrpoRun, run_dir: Path, overrides: list[str], sweep: str | None = None) -> dict:
    """Train in `run_dir` and return the summary. Raises on the user's mistakes; the folder then says `failed` and why."""
    with Interrupts() as interrupts, RunFolder(run_dir, cfg, overrides, resume=bool(cfg.resume)) as folder:
        return _train(cfg, folder, interrupts, sweep)


def _train(cfg: GrpoRun, folder: RunFolder, interrupts: Interrupts, sweep: str | None) -> dict:
    use_threads(cfg.threads)
    device = pick_device(cfg.device)
    found = checkpoint.newest(folder.path)
    P, G = cfg.group_size.prompts_per_step, cfg.group_size.samples_per_prompt

    rules = load_rules(cfg.reward)
    train_problems, heldout_problems, notes = load_problems(cfg.data)
    policy = load_policy(cfg.model, device, cfg.seed, cfg.rollout.temperature)
    prompts = _encode(policy, train_problems, cfg, "training", notes)
    heldout = _encode(policy, heldout_problems, cfg, "held-out", notes)
    optimizer, lr_schedule = build_optimizer(policy.trainable.values(), cfg.optimizer, cfg.steps * cfg.algorithm.updates_per_rollout)
    beta_schedule = BetaSchedule(cfg.kl, cfg.steps)
    progress = Progress()
    if found is not None:
        progress = Progress(**checkpoint.load(found, policy, optimizer, lr_schedule))
        beta_schedule.load_state(progress.beta)

    tracker = Tracker(
        folder.path,
        cfg.tracker,
        config=folder.values,
        total_steps=cfg.steps,
        log_every=cfg.log_every,
        resume_step=progress.step if found else None,
        wandb_id=progress.wandb_id or None,
        group=cfg.tracker.group or sweep,
        run_name=cfg.tracker.run_name or folder.label,
    )
    progress.wandb_id = tracker.wandb_id
    folder.update(device=str(device), versions=versions(), threads=cfg.threads)
    status, reason = "failed", "ended by an error"

    def held_out() -> None:
        tracker.status(f"evaluating {len(heldout)} held-out problems")
        metrics = evaluate(policy, heldout, rules, cfg.reward.accuracy, cfg.evaluation, cfg.rollout, cfg.seed)
        _note_evaluation(progress, metrics, cfg.stop.metric)
        tracker.evaluation(progress.step, metrics)
        folder.update(**_summary(progress, device))

    def save() -> None:
        tracker.status("saving")
        progress.beta = beta_schedule.state()
        best_step = progress.evaluations["best"]["step"]
        checkpoint.save(folder.path, progress.step, policy, optimizer, lr_schedule, vars(progress), cfg.keep_checkpoints, best_step)

    try:
        for note in notes:
            tracker.note(note)
        if found is not None:
            tracker.note(f"resumed from {found.name}: {cfg.steps - progress.step} of {cfg.steps} steps to go")
        else:
            held_out()
            save()

        while (outcome := _outcome(progress, cfg, interrupts)) is None:
            started = time.perf_counter()
            step = progress.step + 1
            drawn = [prompts[i] for i in _draw(cfg.seed, progress.cursor, P, len(prompts))]
            groups = sample(policy, drawn, G, cfg.rollout, uniforms(cfg.seed, "rollout", step, P, G, cfg.rollout.max_new_tokens))
            sampled = time.perf_counter()
            scores = score(rules, groups, cfg.reward.accuracy)
            scored = time.perf_counter()
            advantages_PG = group_relative(scores.total_PG, cfg.algorithm.advantage, cfg.algorithm.std)
            batch = to_device(collate(groups, advantages_PG, policy.pad_id, cfg.algorithm.truncated), device)
            beta = beta_schedule.at(step)
            batch = policy.annotate(batch, reference=beta > 0 or _measures_kl(step, cfg))
            lr = lr_schedule.get_last_lr()[0]
            update = improve(
                policy, optimizer, lr_schedule, batch, beta, cfg.algorithm, cfg.kl, cfg.optimizer.grad_clip, cfg.rollout.max_new_tokens
            )
            if update.kl_B is not None:
                beta_schedule.observe(update.metrics["kl/sequence"])
            ended = time.perf_counter()

            progress.step, progress.cursor = step, progress.cursor + P
            progress.tokens += int(batch.completion_lengths_B.sum())
            progress.seconds += ended - started
            times = {"rollout": sampled - started, "reward": scored - sampled, "update": ended - scored, "step": ended - started}
            metrics = update.metrics | {"kl/beta": beta, "optim/lr": lr} | _rollout_metrics(groups, scores, cfg)
            metrics |= {f"time/{name}_s": seconds for name, seconds in times.items()}
            metrics |= {"speed/tokens_per_s": int(batch.completion_lengths_B.sum()) / times["step"], "memory/peak_gib": peak_memory_gib(device)}
            tracker.step(step, metrics, _group_rows(step, groups, scores, update, cfg))
            if step % cfg.sample_every == 0 or step == 1:
                tracker.samples(step, _sample_rows(step, groups, scores))
            if step % cfg.eval_every == 0 or step == cfg.steps:
                held_out()
            is_best = progress.evaluations["best"]["step"] == step
            if step % cfg.save_every == 0 or step == cfg.steps or is_best:
                save()

        if checkpoint.step_of(checkpoint.newest(folder.path)) != progress.step:
            save()
        status, reason = outcome
        exported = checkpoint.export(folder.path, policy, "best")
        summary = _summary(progress, device) | {"status": status, "reason": reason}
        folder.update(**summary)
        tracker.finish(status, reason, _closing_lines(progress, folder, exported.name, status))
        return folder.summary
    except BaseException as error:
        reason = why(error)
        raise
    finally:
        tracker.finish(status, reason, [f"run folder  {folder.path}"])


def _encode(policy: Policy, problems: list, cfg: GrpoRun, which: str, notes: list[str]) -> list[EncodedProblem]:
    encoded, dropped = policy.encode(problems, cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens)
    if dropped:
        notes.append(f"{dropped} of {len(problems)} {which} prompts are longer than data.max_prompt_tokens={cfg.data.max_prompt_tokens}: left out")
    if not encoded:
        raise ValueError(f"no {which} prompt fits: try a larger data.max_prompt_tokens (now {cfg.data.max_prompt_tokens})")
    return encoded


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, n: int) -> list[int]:
    return permutation(seed, "order", epoch, n).tolist()


def _draw(seed: int, cursor: int, count: int, n: int) -> list[int]:
    """Numbers of the next `count` problems: every problem once per epoch, each epoch in its own order."""
    return [_epoch(seed, i // n, n)[i % n] for i in range(cursor, cursor + count)]


def _measures_kl(step: int, cfg: GrpoRun) -> bool:
    """An adaptive beta needs the KL at every step; with beta at 0 it is measured now and then, so that arms can be compared."""
    return cfg.kl.schedule is KlSchedule.adaptive or step % cfg.kl.measure_every == 0 or step in (1, cfg.steps)


def _outcome(progress: Progress, cfg: GrpoRun, interrupts: Interrupts) -> tuple[str, str] | None:
    """(status, reason) once there is no further step to take."""
    best, last = progress.evaluations["best"], progress.evaluations["last"]
    if progress.step >= cfg.steps:
        return "finished", f"all {cfg.steps} steps taken"
    if interrupts.received:
        return "interrupted", f"{interrupts.received} after step {progress.step}"
    if cfg.stop.threshold is not None and last[cfg.stop.metric] >= cfg.stop.threshold:
        return "stopped", f"{cfg.stop.metric} reached {last[cfg.stop.metric]:.4g} (stop.threshold={cfg.stop.threshold:g}) at step {last['step']}"
    if cfg.stop.patience is not None and progress.since_best >= cfg.stop.patience:
        return "stopped", f"{cfg.stop.metric} has not passed {best[cfg.stop.metric]:.4g} of step {best['step']} for {progress.since_best} evaluations"
    return None


def _note_evaluation(progress: Progress, metrics: dict, by: str) -> None:
    entry = {"step": progress.step} | metrics
    seen = progress.evaluations
    is_best = "best" not in seen or entry[by] > seen["best"][by]
    progress.since_best = 0 if is_best else progress.since_best + 1
    seen.setdefault("first", entry)
    seen["last"] = entry
    if is_best:
        seen["best"] = entry


def _rollout_metrics(groups: list[Group], scores: Scores, cfg: GrpoRun) -> dict[str, float]:
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    cut = [c.ended is Ended.length for group in groups for c in group.completions]
    metrics = {
        "reward/mean": scores.total_PG.mean().item(),
        "reward/group_std": group_spread(scores.total_PG, cfg.algorithm.std).mean().item(),
        "group/frac_zero_std": all_equal(scores.total_PG).float().mean().item(),
        "group/frac_all_right": scores.right_PG.all(dim=1).float().mean().item(),
        "group/frac_all_wrong": (~scores.right_PG).all(dim=1).float().mean().item(),
        "completion/tokens": sum(lengths) / len(lengths),
        "completion/truncated_frac": sum(cut) / len(cut),
    }
    metrics |= {f"reward/rule/{name}": rule_PG.nanmean().item() for name, rule_PG in scores.rule_PG.items()}
    return metrics | {f"reward/not_applicable/{name}": count for name, count in scores.not_applicable.items() if count}


def _verdict(right_G: torch.Tensor, equal: bool) -> str:
    if right_G.all():
        return "all_right"
    if not right_G.any():
        return "all_wrong"
    return "tied" if equal else "mixed"


def _group_rows(step: int, groups: list[Group], scores: Scores, update: Update, cfg: GrpoRun) -> list[dict]:
    spread_P, equal_P = group_spread(scores.total_PG, cfg.algorithm.std), all_equal(scores.total_PG)
    kl_P = None if update.kl_B is None else update.kl_B.view(len(groups), -1).mean(dim=1).tolist()
    return [
        {
            "step": step,
            "problem": group.encoded.problem.id,
            "rewards": scores.total_PG[p].tolist(),
            "reward_mean": scores.total_PG[p].mean().item(),
            "reward_std": spread_P[p].item(),
            "kl": None if kl_P is None else kl_P[p],
            "lengths": [len(c.token_ids) for c in group.completions],
            "verdict": _verdict(scores.right_PG[p], bool(equal_P[p])),
        }
        for p, group in enumerate(groups)
    ]


def _sample_rows(step: int, groups: list[Group], scores: Scores, most: int = 4) -> list[dict]:
    """The first completion of the first few groups."""
    return [
        {
            "step": step,
            "problem": group.encoded.problem.id,
            "prompt": group.encoded.prompt_text,
            "completion": group.completions[0].text,
            "answer": group.encoded.problem.answer,
            "rewards": {name: rule_PG[p, 0].item() for name, rule_PG in scores.rule_PG.items()},
            "total": scores.total_PG[p, 0].item(),
            "tokens": len(group.completions[0].token_ids),
            "ended": group.completions[0].ended.name,
        }
        for p, group in enumerate(groups[:most])
    ]


def _summary(progress: Progress, device: torch.device) -> dict:
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "training_seconds": round(progress.seconds, 2),
        "peak_memory_gib": round(peak_memory_gib(device), 3),
        "evaluation": progress.evaluations,
    }


def _closing_lines(progress: Progress, folder: RunFolder, exported: str, status: str) -> list[str]:
    first, last, best = (progress.evaluations[which] for which in ("first", "last", "best"))

    def change(name: str, metric: str) -> str:
        return (
            f"{name:<18} {first[metric]:.3f} -> {last[metric]:.3f}  (+-{last[f'{metric}_se']:.3f}, n={last[f'{metric}_n']}, "
            f"steps {first['step']} -> {last['step']})"
        )

    lines = [
        change("sampled accuracy", "eval/accuracy"),
        change("greedy accuracy", "eval/accuracy_greedy"),
        change("reward", "eval/reward"),
        f"best               step {best['step']}, kept in {exported}/",
        f"training           {progress.seconds:.0f} s, {progress.tokens} completion tokens",
        f"run folder         {folder.path}",
        f"evaluate           grpo-eval run={folder.path}",
    ]
    if status != "finished":
        lines.append(f"resume             grpo-train resume={folder.path}")
    return lines
