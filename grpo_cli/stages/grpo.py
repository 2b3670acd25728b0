"""The GRPO run: assemble the pieces, then sample, score, weigh, improve, until the budget is spent or there is a reason to stop."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from grpo_cli import checkpoint, runfolder
from grpo_cli.advantages import assign
from grpo_cli.batch import collate, to_device
from grpo_cli.collect import Collected, collect
from grpo_cli.config import Advantage, Control, Engine, Estimator, GateMode, GrpoRun, KlSchedule, Placement
from grpo_cli.curriculum import Curriculum, load_pass_rates
from grpo_cli.data import fingerprint, load_problems
from grpo_cli.evaluation import evaluate
from grpo_cli.kl import BetaSchedule
from grpo_cli.ledger import Totals, book, opened, partition, sentence
from grpo_cli.measures import group_rows, rollout_metrics, sample_rows
from grpo_cli.optim import build_optimizer
from grpo_cli.policy import Policy, load_policy, sampled_from
from grpo_cli.records import EncodedProblem, Group, Problem
from grpo_cli.rewards import Rules, gate, sandbox
from grpo_cli.rewards.control import shuffled_golds
from grpo_cli.rollout import check_native, token_of
from grpo_cli.runtime import Interrupts, Stopwatch, hydra_override, peak_memory_gib, pick_device, script, use_threads
from grpo_cli.tracking import Tracker, announce
from grpo_cli.tracking.files import read_rows
from grpo_cli.update import improve


@dataclass
class Progress:
    """What a checkpoint keeps of the loop itself."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    evaluations: dict[str, dict] = field(default_factory=dict)
    """The first, best and last evaluation, each with its step."""
    since_best: int = 0
    wandb_id: str | None = None
    beta: dict = field(default_factory=dict)
    cursor: int = 0
    pass_rates: dict[str, dict] = field(default_factory=dict)
    """The state of the curriculum."""
    ledger: Totals = field(default_factory=opened)
    origin: dict = field(default_factory=dict)
    """What the run started from: its config, and fingerprints of its model and data."""

    def note_step(self, tokens: int, seconds: float) -> None:
        self.step += 1
        self.tokens += tokens
        self.seconds += seconds

    def note_evaluation(self, metrics: dict[str, float], by: str) -> None:
        entry = {"step": self.step} | metrics
        is_best = "best" not in self.evaluations or entry[by] > self.evaluations["best"][by]
        self.since_best = 0 if is_best else self.since_best + 1
        self.evaluations = {"first": entry} | self.evaluations | {"last": entry} | ({"best": entry} if is_best else {})


def run(cfg: GrpoRun, run_dir: Path, overrides: list[str], sweep: str | None = None, name: str | None = None) -> dict:
    """Train in `run_dir` and return the summary. Raises on the user's mistakes; the folder then says `failed` and why.

    The run is called `name` in wandb, in the group `sweep`.
    """
    with (
        Interrupts() as interrupts,
        runfolder.RunFolder(run_dir, cfg, overrides, resume=bool(cfg.resume)) as folder,
        Rules(cfg.reward, cfg.device) as rules,
    ):
        return _train(cfg, folder, interrupts, rules, sweep, name or run_dir.name)


def _train(cfg: GrpoRun, folder: runfolder.RunFolder, interrupts: Interrupts, rules: Rules, sweep: str | None, name: str) -> dict:
    use_threads(cfg.threads)
    device = pick_device(cfg.device)
    P, G, T = cfg.group_size.prompts_per_step, cfg.group_size.samples_per_prompt, cfg.rollout.max_new_tokens
    folder.update(device=str(device))

    train_problems, heldout_problems, notes = load_problems(cfg.data)
    notes += _examine(rules, train_problems, folder)
    if cfg.reward.control is Control.shuffled_gold:
        train_problems = shuffled_golds(train_problems, cfg.seed)
    announce(f"loading {cfg.model.path} on {device}")
    policy = load_policy(cfg.model, device, cfg.seed, sampled_from(cfg.rollout), cfg.rollout.engine, moving=cfg.kl.sync_every is not None)
    prompts = _encode(policy, train_problems, cfg, "training", notes)
    heldout = _encode(policy, heldout_problems, cfg, "held-out", notes)
    checked = check_native(policy, prompts[0], G, cfg.rollout, cfg.seed)
    folder.update(forward=checked)
    if cfg.rollout.engine is Engine.native and policy.native is None:
        notes.append(f"on the plain transformers forward, which is slower: {checked['why']}")
    optimizer, lr_schedule = build_optimizer(policy.trainable.values(), cfg.optimizer, cfg.steps * cfg.algorithm.updates_per_rollout)
    beta_schedule = BetaSchedule(cfg.kl, cfg.steps)
    known = load_pass_rates(cfg.data.difficulty_map) if cfg.data.difficulty_map else {}
    curriculum = Curriculum([p.problem.id for p in prompts], cfg.seed, cfg.data.difficulty, cfg.data.revisit, known)

    data = fingerprint(train_problems, heldout_problems)
    progress = Progress(origin={"config": runfolder.identity(folder.values), "model": policy.fingerprint(), "data": data})
    found = checkpoint.newest(folder.path) if cfg.resume else None
    if found is not None:
        saved = Progress(**checkpoint.load(found, policy, optimizer, lr_schedule))
        _refuse_another(saved.origin, progress.origin, found)
        progress = saved
        beta_schedule.load_state(progress.beta)
        curriculum.cursor, curriculum.pass_rates = progress.cursor, progress.pass_rates
        checkpoint.point(folder.path, progress.step, progress.evaluations["best"]["step"])
        notes.append(f"resumed from {found.name}: {cfg.steps - progress.step} of {cfg.steps} steps to go")
    tracker = Tracker(
        folder.path,
        cfg.tracker,
        config=folder.values,
        total_steps=cfg.steps,
        log_every=cfg.log_every,
        resume_step=progress.step if found else None,
        wandb_id=progress.wandb_id,
        group=sweep,
        run_name=name,
    )
    progress.wandb_id = tracker.wandb_id

    def summarise(**changes) -> None:
        folder.update(
            step=progress.step,
            tokens=progress.tokens,
            training_seconds=round(progress.seconds, 2),
            peak_memory_gib=round(peak_memory_gib(device), 3),
            evaluation=progress.evaluations,
            ledger=progress.ledger,
            **changes,
        )

    def held_out() -> None:
        tracker.status(f"evaluating {len(heldout)} held-out problems")
        metrics, solved = evaluate(policy, heldout, rules, cfg.evaluation, cfg.rollout, cfg.seed)
        progress.note_evaluation(metrics, cfg.stop.metric)
        tracker.evaluation(progress.step, metrics)
        tracker.solved(progress.step, solved)
        summarise()

    def save() -> None:
        progress.beta = beta_schedule.state()
        progress.cursor, progress.pass_rates = curriculum.cursor, curriculum.pass_rates
        runfolder.write_json(folder.path / "difficulty.json", curriculum.pass_rates)
        best_step = progress.evaluations["best"]["step"]
        checkpoint.save(folder.path, progress.step, policy, optimizer, lr_schedule, vars(progress), cfg.keep_checkpoints, best_step)

    failed: set[str] = set()
    try:
        for note in notes:
            tracker.note(note)
        if found is None:
            held_out()
            save()

        while (outcome := _outcome(progress, cfg, interrupts)) is None:
            step, clock = progress.step + 1, Stopwatch()
            got = collect(
                policy,
                prompts,
                curriculum,
                rules,
                cfg.rollout,
                P,
                G,
                cfg.algorithm.resample_tries,
                cfg.seed,
                step,
                clock,
            )
            if not got.groups:
                outcome = "stopped", _no_signal(got, cfg, step)
                break
            groups, scores = got.groups, got.scores
            batch = to_device(collate(groups, policy.pad_id, cfg.algorithm.truncated), device)
            beta, lr = beta_schedule.at(step), lr_schedule.get_last_lr()[0]
            exact, in_reward = beta > 0 and cfg.kl.estimator is Estimator.exact, beta > 0 and cfg.kl.placement is Placement.reward
            batch = policy.annotate(batch, reference=beta > 0 or _measures_kl(step, cfg), exact=exact, old=in_reward)
            steps_B = _step_tokens(policy, groups, scores.steps_B) if cfg.algorithm.advantage is Advantage.process else []
            batch.advantages_BT = assign(scores, rules.weights, steps_B, batch, beta, cfg.algorithm, cfg.kl)
            update = improve(policy, optimizer, lr_schedule, batch, beta, cfg.algorithm, cfg.kl, cfg.optimizer.grad_clip, T)
            beta_schedule.observe(step, update.kl_B)
            if cfg.kl.sync_every and step % cfg.kl.sync_every == 0:
                policy.sync_reference(cfg.kl.sync_alpha)
            clock.lap("update")

            for rule, example in scores.examples.items():
                if rule not in failed:
                    tracker.note(f"{example} (scored {cfg.reward.rules[rule].on_error:g}; reward/errors/{rule} counts them)")
                failed.add(rule)
            progress.note_step(got.tokens, clock.total)
            metrics = rollout_metrics(groups, scores, cfg.algorithm.std) | got.metrics | update.metrics | {"kl/beta": beta, "optim/lr": lr}
            parts_B = partition(scores, assign(scores, rules.weights, steps_B, batch, 0.0, cfg.algorithm, cfg.kl), batch.trained_B)
            metrics |= book(progress.ledger, parts_B, batch.completion_lengths_B.tolist(), got.dropped_tokens, clock.laps)
            metrics |= clock.metrics() | {"speed/tokens_per_s": got.tokens / clock.total, "memory/peak_gib": peak_memory_gib(device)}
            tracker.step(step, metrics, group_rows(step, groups, scores, update.kl_B, cfg.algorithm.std))
            if step % cfg.sample_every == 0 or step == 1:
                tracker.samples(step, sample_rows(step, groups, scores))
            if step % cfg.eval_every == 0 or step == cfg.steps:
                held_out()
            if step % cfg.save_every == 0 or step == cfg.steps or progress.evaluations["best"]["step"] == step:
                save()

        if checkpoint.step_of(checkpoint.newest(folder.path)) != progress.step:
            save()
        status, reason = outcome
        exported = checkpoint.export(folder.path, policy, "best")
        summarise(status=status, reason=reason)
        rows = read_rows(folder.path / "metrics.jsonl", progress.step)
        signal = [f"signal             {sentence(rows, folder.path, cfg.reward, G, T)}"] if rows else []
        tracker.finish(status, reason, [*_closing_lines(progress, folder.path, exported.name, status), *signal])
        return folder.summary
    except KeyboardInterrupt:
        tracker.finish("interrupted", f"after step {progress.step}", [_how_to_continue(folder.path)])
        raise
    finally:
        tracker.finish("failed", f"after step {progress.step}", [f"run folder  {folder.path}"])


def _examine(rules: Rules, problems: list[Problem], folder: runfolder.RunFolder) -> list[str]:
    """Notes on what the rules pay, which also goes into the summary. ValueError when reward.gate.mode=refuse finds fault with them."""
    section, notes = rules.section, []
    if section.gate.mode is not GateMode.off:
        found = gate.check(rules, problems[: section.gate.problems])
        folder.update(gate=found)
        ok, line = gate.verdict(found)
        if not ok and section.gate.mode is GateMode.refuse:
            raise ValueError(f"{line}: mend the rules, or go on all the same with reward.gate.mode=warn")
        notes.append(line)
    if any(rule.args.get("allow_unsandboxed") for rule in section.rules.values()):
        folder.update(sandboxed=sandbox.works())
        if not sandbox.works():
            notes.append("allow_unsandboxed=true, and there is no sandbox here: model-written programs run with your own rights")
    return notes


def _refuse_another(saved: dict, here: dict, found: Path) -> None:
    """A run continues on what it began with, whatever has happened to the files since. ValueError names what differs."""
    differing = runfolder.differences(saved["config"], here["config"])
    if differing:
        raise ValueError(f"{found} was saved under another config: {'; '.join(differing[:5])}: give config.yaml its old values again")
    for part, where in (("model", "model.path"), ("data", "data.path")):
        if saved[part] != here[part]:
            raise ValueError(f"this is not the {part} that {found} was saved with: put the old files of {where} back, or start a new run")


def _encode(policy: Policy, problems: list[Problem], cfg: GrpoRun, which: str, notes: list[str]) -> list[EncodedProblem]:
    """The prompts that fit, with notes on those that do not and on those that the tokenizer cannot spell."""
    limit, T = cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens
    encoded, dropped = policy.encode(problems, limit, T)
    window = getattr(policy.lm.config, "max_position_embeddings", None)
    if window is None or limit <= window - T:
        bound, advice = f"data.max_prompt_tokens={limit}", f"data.max_prompt_tokens={2 * limit}, or data of shorter questions"
    else:
        bound = f"the {window - T} tokens that rollout.max_new_tokens={T} leaves of the model's window of {window}"
        advice = f"rollout.max_new_tokens={max(1, T // 2)}, or a model with a longer window"
    if dropped:
        notes.append(f"{dropped} of {len(problems)} {which} prompts are longer than {bound}: left out")
    if not encoded:
        raise ValueError(f"no {which} prompt fits, all are longer than {bound}: try {advice}")
    unknown = policy.tokenizer.unk_token_id
    if unknown is not None and unknown not in policy.eos_ids:
        blurred = sum(unknown in prompt.prompt_ids for prompt in encoded)
        if blurred:
            notes.append(f"{blurred} of {len(encoded)} {which} prompts hold characters unknown to the model's tokenizer")
    return encoded


def _step_tokens(policy: Policy, groups: list[Group], steps_B: list[list[tuple[int, float]]]) -> list[list[tuple[int, float]]]:
    """Step rewards by the token they end with instead of their place in the text."""
    completions = [c for group in groups for c in group.completions]
    return [[(token_of(policy, c.token_ids, end), reward) for end, reward in steps] for c, steps in zip(completions, steps_B, strict=True)]


def _no_signal(got: Collected, cfg: GrpoRun, step: int) -> str:
    right, wrong = got.metrics["group/dropped_all_right"], got.metrics["group/dropped_all_wrong"]
    return (
        f"dynamic sampling found no group of mixed accuracy in {got.metrics['group/rollouts']} rollouts of step {step} ({right} all right, "
        f"{wrong} all wrong): the problems are too {'easy' if right > wrong else 'hard'} for this policy: try other data, "
        f"'data.difficulty=[0.2,0.8]', or algorithm.resample_tries=0"
    )


def _measures_kl(step: int, cfg: GrpoRun) -> bool:
    """An adaptive beta needs the KL at every step; with beta at 0 it is measured now and then, so that arms can be compared."""
    return cfg.kl.schedule is KlSchedule.adaptive or step % cfg.kl.measure_every == 0 or step in (1, cfg.steps)


def _outcome(progress: Progress, cfg: GrpoRun, interrupts: Interrupts) -> tuple[str, str] | None:
    """(status, reason) once there is no further step to take."""
    metric, best, last = cfg.stop.metric, progress.evaluations["best"], progress.evaluations["last"]
    if progress.step >= cfg.steps:
        return "finished", f"all {cfg.steps} steps taken"
    if interrupts.received:
        return "interrupted", f"{interrupts.received} after step {progress.step}"
    if cfg.stop.threshold is not None and last[metric] >= cfg.stop.threshold:
        return "stopped", f"{metric} reached {last[metric]:.4g} at step {last['step']} (stop.threshold={cfg.stop.threshold:g})"
    if cfg.stop.patience is not None and progress.since_best >= cfg.stop.patience:
        return "stopped", f"{metric} has not passed {best[metric]:.4g} of step {best['step']} for {progress.since_best} evaluations"
    return None


def _closing_lines(progress: Progress, folder: Path, exported: str, status: str) -> list[str]:
    """Before -> after, where things are, and what to type next."""
    first, last, best = (progress.evaluations[which] for which in ("first", "last", "best"))
    lines = [f"held-out problems  before -> after (step {first['step']} -> {last['step']})"]
    for name, metric in (("sampled accuracy", "eval/accuracy"), ("greedy accuracy", "eval/accuracy_greedy"), ("reward", "eval/reward")):
        error, n = last[f"{metric}_se"], last[f"{metric}_n"]
        known = f"standard error {error:.3f}, " if error is not None and math.isfinite(error) else ""  # null in a file read back
        lines.append(f"{name:<18} {first[metric]:.3f} -> {last[metric]:.3f}  ({known}n={n})")
    lines += [
        f"best               step {best['step']}, kept in {exported}/",
        f"training           {progress.seconds:.0f} s, {progress.tokens} completion tokens",
        f"run folder         {folder}",
        f"evaluate           {script('grpo-eval')} {hydra_override('run', folder)}",
    ]
    return lines if status == "finished" else [*lines, _how_to_continue(folder)]


def _how_to_continue(folder: Path) -> str:
    return f"continue           {script('grpo-train')} {hydra_override('resume', folder)}"
