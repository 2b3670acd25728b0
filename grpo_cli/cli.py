"""The console scripts: grpo-train, grpo-plan, grpo-eval, grpo-score, grpo-sft and grpo-report.

Everything that can be wrong with a command is found before Hydra runs a job, before a folder exists and before torch is
imported, and told in one message. The only module that knows hydra.main.
"""

import difflib
import functools
import hashlib
import importlib
import math
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli import launcher, runfolder
from grpo_cli.compose import CONF, Command, Composer, convert, given_value
from grpo_cli.config import GrpoRun, ScoreRun, SftRun
from grpo_cli.runtime import hydra_text

TRAIN = Command(
    "grpo-train",
    "grpo",
    GrpoRun,
    "Trains a language model with GRPO on a task whose answers can be checked, and measures accuracy on held-out problems. "
    "Without arguments it trains the embedded model on additions; every group and key below can be overridden.",
    [
        "grpo-train  # the embedded default, about a minute on a laptop",
        "grpo-train model=qwen2_5_0_5b data=gsm8k kl=linear kl.beta=0.02",
        "grpo-train -m kl.beta=0,0.04 group_size=g4,g8  # a sweep of four jobs; the same command again continues it",
    ],
)
PLAN = Command(
    "grpo-plan",
    "grpo",
    GrpoRun,
    "Shows what grpo-train would do with the same arguments, without loading a model: the equation with its numbers, the batch table, "
    "the first problems, and warnings for known traps.",
    [
        "grpo-plan  # the embedded default",
        "grpo-plan algorithm=dapo kl=none",
        "grpo-plan -cd recipes/grpo -cn gsm8k_qwen2_5_0_5b optimizer.lr=1e-6",
    ],
)
SFT = Command(
    "grpo-sft",
    "sft",
    SftRun,
    "Trains a language model on prompt/completion pairs, counting completion tokens only: the warm start of a GRPO run. "
    "Start from the result with grpo-train model=hf model.path=RUN_FOLDER/model, or model.lora.path=RUN_FOLDER/adapter.",
    [
        "grpo-sft demos.path=demos.jsonl hydra.run.dir=outputs/warm_start",
        "grpo-sft demos=sloppy_addition steps=650 optimizer.lr=3e-3",
    ],
)
SCORE = Command(
    "grpo-score",
    "score",
    ScoreRun,
    "Scores completions in a file with the reward rules of a config, without a model: to try a rule, and to look into what it pays. "
    "A row holds completion, answer (or gold), and what the rules read; the scores are saved one JSON object per row, in the same order.",
    [
        "grpo-score reward=math completions=completions.jsonl",
        "grpo-score reward=code completions=completions.jsonl save=scores.jsonl",
        "grpo-score completions=completions.jsonl +reward.rules.mine.fn=mine:short",
    ],
)
EVAL = Command(
    "grpo-eval",
    "config",
    GrpoRun,
    "Measures a trained run on its held-out problems: greedy and sampled accuracy and pass@k, each with a standard error. "
    "The run's own config is used, with your overrides on top.",
    [
        "grpo-eval run=outputs/grpo/2026-01-31_12-00-00",
        "grpo-eval run=outputs/grpo/2026-01-31_12-00-00 checkpoint=last evaluation.samples_per_problem=8 data.eval.limit=500",
    ],
    own_keys="run=FOLDER (a run folder of grpo-train)  checkpoint=best (or last, a step number, a folder)",
)

REPORT = Command(
    "grpo-report",
    "grpo",
    GrpoRun,
    "Reports on what runs left in their folders: one run, a sweep or several folders with verdicts on the axes, or a list of all runs "
    "below a folder. Writes report.html, report.md and report.json into the first folder.",
    [
        "grpo-report outputs/grpo/2026-01-31_12-00-00",
        "grpo-report outputs/grpo/sweeps/1a2b3c4d  # which arm was better, and is that shown",
        "grpo-report outputs/grpo/sweeps/1a2b3c4d control_run save=reports/beta",
        "grpo-report outputs  # all runs below",
    ],
    own_keys="FOLDER...  save=FOLDER (where to write the report)",
)


def train() -> None:
    sys.exit(_guarded(_hydra_command, TRAIN, sys.argv[1:]))


def sft() -> None:
    sys.exit(_guarded(_hydra_command, SFT, sys.argv[1:]))


def evaluate() -> None:
    sys.exit(_guarded(_evaluate, EVAL, sys.argv[1:]))


def plan() -> None:
    sys.exit(_guarded(_show_plan, PLAN, sys.argv[1:]))


def score() -> None:
    sys.exit(_guarded(_score, SCORE, sys.argv[1:]))


def report() -> None:
    sys.exit(_guarded(_report, REPORT, sys.argv[1:]))


def _guarded(function, command: Command, argv: list[str]) -> int:
    """The exit status; a user's mistake is one message."""
    try:
        return function(command, argv)
    except (ValueError, OSError) as error:
        if _full_error():
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return launcher.INTERRUPTED


def _full_error() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


# --- one command -------------------------------------------------------------------------------------------------------


def _hydra_command(command: Command, argv: list[str]) -> int:
    args = _parse(command, argv)
    if args.help:
        print(_help(command))
        return 0
    if args.info or args.shell_completion or args.hydra_help or args.cfg:
        if args.cfg:
            with Composer(command, args.config_name, args.config_dir, args.config_path) as composer:
                composer.compose(args.overrides)
        _run_hydra(command, [*(word for word in argv if word not in args.overrides), *args.overrides])
        return 0
    plan, unfinished = _plan(command, args), False
    try:
        ended_well = _run_hydra(command, plan.argv)
    finally:
        if plan.sweep_dir:
            jobs = plan.jobs or _jobs_found(plan.sweep_dir)
            print("\n" + importlib.import_module("grpo_cli.tracking.jobs").table(plan.sweep_dir, jobs))
            unfinished = any(runfolder.summary(folder).get("status") not in runfolder.DONE for folder, _ in jobs)
            if unfinished and command is TRAIN:
                print("The same command again continues what is not finished.")
    # The folders tell of jobs that a launcher ran elsewhere, and may tell of an earlier command.
    return int(not ended_well or unfinished)


def _run_hydra(command: Command, argv: list[str]) -> bool:
    """Hand over to Hydra; whether all jobs that it ran in this process ended well."""
    ended_well = []

    @hydra.main(version_base="1.3", config_path="pkg://grpo_cli.conf", config_name=command.config)
    @functools.wraps(_job)
    def task(cfg: DictConfig) -> float | None:
        ended_well.append(_job(cfg))
        return runfolder.objective(Path(HydraConfig.get().runtime.output_dir))

    launcher.register()
    sys.argv = [command.script, *argv]
    task()
    return all(ended_well)


def _jobs_found(sweep_dir: Path) -> list[tuple[Path, str]]:
    folders = sorted(file.parent for file in sweep_dir.glob("*/summary.json"))
    return [(folder, " ".join(runfolder.summary(folder).get("overrides", []))) for folder in folders]


def _job(cfg: DictConfig) -> bool:
    """One job of Hydra's: whether it ended well. A failure is told and recorded, so that the next job of a sweep starts."""
    job = HydraConfig.get()
    run_dir = _relative(job.runtime.output_dir)
    overrides = list(job.overrides.task)
    sweep = Path(job.sweep.dir).name if job.mode == RunMode.MULTIRUN else None
    swept = job.job.override_dirname  # without what all jobs share, see _plan_sweep
    label = f"job {job.job.num} ({swept}): " if sweep else ""
    try:
        run = convert(cfg, overrides)
        if sweep and runfolder.is_done(run_dir, run):
            print(f"{label}finished already in {run_dir}, skipped")
            return True
        if isinstance(run, GrpoRun):
            for warning in importlib.import_module("grpo_cli.stages.plan").warnings(run):
                print(f"warning: {warning}")
            if sweep and runfolder.holds_run(run_dir):
                run.resume = "auto"
            summary = importlib.import_module("grpo_cli.stages.grpo").run(run, run_dir, overrides, sweep, swept if sweep else run_dir.name)
        else:
            summary = importlib.import_module("grpo_cli.stages.sft").run(run, run_dir, overrides)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # code of the user's may raise SystemExit, which must not pass for success
        if not runfolder.summary(run_dir):  # it failed before it had the folder
            runfolder.record_failure(run_dir, error)
        _tell(error, label, run_dir / "error.log", bool(cfg.get("debug")))
        return False
    if summary["status"] == "interrupted":
        raise KeyboardInterrupt
    return True


def _tell(error: BaseException, label: str, log: Path, debug: bool) -> None:
    if debug or _full_error():
        traceback.print_exception(error)
    where = "" if isinstance(error, (ValueError, OSError)) or not log.exists() else f"\nThe traceback is in {log}"
    print(f"error: {label}{runfolder.reason(error)}{where}", file=sys.stderr)


def _evaluate(command: Command, argv: list[str]) -> int:
    given = [arg for arg in argv if arg.startswith(("run=", "checkpoint="))]
    own = dict(map(_own_value, given))
    if len(given) > len(own):
        raise ValueError(f"{' and '.join(given)}: one run and one checkpoint are evaluated at a time: keep one of each")
    args = _parse(command, [arg for arg in argv if arg.split("=")[0] not in ("run", "checkpoint")])
    if args.help:
        print(_help(command))
        return 0
    if any(value for name, value in vars(args).items() if name not in ("overrides", "help")):
        raise ValueError("grpo-eval takes run=FOLDER, checkpoint=... and overrides such as data.eval.limit=500, and no flags but --help")
    if not own.get("run"):
        raise ValueError("run is not set: try grpo-eval run=FOLDER, with a run folder of grpo-train")
    folder = Path(own["run"])
    runfolder.load(folder)
    with Composer(command, "config", folder) as composer:
        composer.refuse_groups(args.overrides, f"grpo-eval run={folder}")
        for override in composer.parse(args.overrides):
            key = override.key_or_group
            if f"{key}.".startswith("model.") and key not in ("model.dtype", "model.micro_batch_tokens"):
                raise ValueError(
                    f"{override.input_line} cannot be changed here: a checkpoint fits only the model that it was trained with: drop it "
                    "(of model, dtype and micro_batch_tokens may change)"
                )
        run = convert(composer.compose(args.overrides), args.overrides)
    try:
        metrics = importlib.import_module("grpo_cli.stages.eval").run(run, folder, own.get("checkpoint") or "best", args.overrides)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        log = folder / "error.log"
        runfolder.log_traceback(folder, error)
        _tell(error, "", log, run.debug)
        return 1
    print("\n".join(_metric_lines(metrics)))
    return 0


def _show_plan(command: Command, argv: list[str]) -> int:
    if run := _without_hydra(command, argv):
        print(importlib.import_module("grpo_cli.stages.plan").report(run))
    return 0


def _score(command: Command, argv: list[str]) -> int:
    if run := _without_hydra(command, argv):
        importlib.import_module("grpo_cli.stages.score").run(run)
    return 0


def _report(command: Command, argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(_about(command))
        return 0
    if flags := [word for word in argv if word.startswith("-")]:
        raise ValueError(f"{flags[0]} is not a flag: grpo-report takes folders, save=FOLDER and --help")
    saves = [os.path.expanduser(word.removeprefix("save=")) for word in argv if word.startswith("save=")]
    folders = [Path(word) for word in argv if not word.startswith("save=")]
    if not folders or len(saves) > 1 or not all(saves):
        raise ValueError("grpo-report takes one or more folders and at most one save=FOLDER: try grpo-report outputs")
    with Composer(TRAIN, None, None) as composer:
        default = runfolder.values(convert(composer.compose([]), []))
    print(importlib.import_module("grpo_cli.report").run(folders, Path(saves[0]) if saves else None, default))
    return 0


def _without_hydra(command: Command, argv: list[str]) -> GrpoRun | ScoreRun | None:
    """The config of a command that leaves no run folder; None when help was asked for, and given."""
    args = _parse(command, argv)
    if args.help:
        print(_help(command))
        return None
    taken = ("overrides", "config_name", "config_dir", "config_path")
    if any(value for name, value in vars(args).items() if name not in taken):
        raise ValueError(f"{command.script} runs no jobs: it takes overrides, -cd FOLDER, -cn NAME and --help, and no other flag")
    with Composer(command, args.config_name, args.config_dir, args.config_path) as composer:
        return convert(composer.compose(args.overrides), args.overrides)


def _own_value(argument: str) -> tuple[str, str]:
    """Key and value of run= and checkpoint=: the text as the shell gave it, or one in Hydra's quotes."""
    key, value = argument.split("=", 1)
    if value[:1] in ("'", '"'):
        value = given_value(key, [argument]) or value
    return key, os.path.expanduser(value)


def _metric_lines(metrics: dict[str, Any]) -> Iterator[str]:
    """One line per figure, its standard error (where it is known) and sample size beside it; a dash for what could not be measured."""
    for name, value in metrics.items():
        if name.endswith(("_se", "_n")):
            continue
        shown = value if not isinstance(value, float) else f"{value:.4f}" if math.isfinite(value) else "-"
        error = metrics.get(f"{name}_se")
        error = f" +- {error:.4f}" if error is not None and math.isfinite(error) else ""
        count = f"  (n={metrics[f'{name}_n']})" if f"{name}_n" in metrics else ""
        yield f"{name:<22} {shown}{error}{count}"


# --- before the first job ----------------------------------------------------------------------------------------------


@dataclass
class Plan:
    argv: list[str]
    """What Hydra is to see."""
    sweep_dir: Path | None = None
    jobs: list[tuple[Path, str]] = field(default_factory=list)
    """Folder and overrides of each job of a sweep; empty when only the sweeper knows them."""


def _plan(command: Command, args) -> Plan:
    """Check every job and choose the folders. Nothing is written before all checks have passed."""
    overrides, name, directory = args.overrides, args.config_name, args.config_dir
    resume = _resume_folder(command, overrides)
    repeats = resume and not name and not directory and not args.multirun
    if repeats:
        runfolder.load(resume)
        name, directory = "config", resume
    flags = [f"--config-{what}={value}" for what, value in (("path", args.config_path), ("dir", directory), ("name", name)) if value]
    with Composer(command, name, directory, args.config_path) as composer:
        if repeats:
            composer.refuse_groups(overrides, f"resume={resume}")
        cfg = None if args.multirun else composer.compose(overrides)
        if cfg is None or cfg.hydra.mode == RunMode.MULTIRUN:
            plan = _plan_sweep(composer, overrides)
            return Plan(["-m", *flags, *overrides, *plan.argv, hydra_text("hydra.sweep.dir", plan.sweep_dir)], plan.sweep_dir, plan.jobs)
        _refuse_key("hydra.sweep", composer.parse(overrides), "without -m: add -m, or choose the folder with hydra.run.dir=FOLDER")
        run = convert(cfg, overrides)
        run_dir = _run_dir(cfg, run)
    return Plan([*flags, *overrides, hydra_text("hydra.run.dir", run_dir)])


def _refuse_key(start: str, overrides: list[Override], advice: str) -> None:
    for override in overrides:
        if override.key_or_group.startswith(start):
            raise ValueError(f"{override.input_line} is not read {advice}")


def _plan_sweep(composer: "Composer", overrides: list[str]) -> Plan:
    _refuse_key("hydra.run.dir", composer.parse(overrides), "by a sweep: try hydra.sweep.dir=FOLDER, in which each job has a folder")
    for_hydra, jobs = composer.jobs(overrides)
    words = [composer.name, *(o for o in overrides if not o.startswith(("debug=", "resume=", "hydra.launcher", "hydra/launcher")))]
    name = hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]
    OmegaConf.register_new_resolver("sweep_name", lambda: name, replace=True)
    if jobs is None:
        cfg = composer.compose(for_hydra)
        _check_launcher(cfg, [_sweep_run(cfg, for_hydra)])
        return Plan([], _make(_folder(cfg, "sweep.dir")))
    shared = [word for word in jobs[0] if all(word in job for job in jobs)] if len(jobs) > 1 else []
    # Hydra names a job by its overrides; those that all jobs share say nothing.
    keys = ",".join(override.key_or_group for override in composer.parse(shared))
    naming = [f"hydra.job.config.override_dirname.{setting}" for setting in (f"exclude_keys=[{keys}]", "item_sep=' '")]
    placed, runs, taken, sweep_dirs = [], [], {}, set()
    for number, job in enumerate(jobs):
        try:
            cfg = composer.compose(for_hydra + naming + job, number)
            run = _sweep_run(cfg, job)
            runs.append(run)
            sweep_dir = _folder(cfg, "sweep.dir")
            sweep_dirs.add(sweep_dir)
            folder = sweep_dir / _folder(cfg, "sweep.subdir")
            if (other := taken.setdefault(folder.resolve(), number)) != number:
                raise ValueError(f"it would share the folder {folder} with job {other}: drop hydra.sweep.subdir")
            if not runfolder.is_done(folder, run):
                runfolder.check(folder, run, resume=isinstance(run, GrpoRun))
        except ValueError as error:
            raise ValueError(f"job {number} ({' '.join(job)}): {error}") from error
        placed.append((folder, " ".join(word for word in job if word not in shared)))
    if len(sweep_dirs) > 1:
        named = ", ".join(sorted(map(str, sweep_dirs)))
        raise ValueError(f"hydra.sweep.dir differs between the jobs ({named}): put what differs into hydra.sweep.subdir")
    _check_launcher(cfg, runs)
    return Plan(naming, _make(sweep_dir), placed)


def _check_launcher(cfg: DictConfig, runs: list[GrpoRun | SftRun]) -> None:
    if OmegaConf.get_type(cfg.hydra, "launcher") is launcher.Isolated:
        for key in sorted(map(str, cfg.hydra.launcher.keys() - launcher.Isolated.__dataclass_fields__.keys())):
            raise ValueError(f"hydra.launcher.{key} is unknown: the isolated launcher has gpus, gpus_per_job and jobs_at_once: drop it")
        launcher.slots(OmegaConf.to_object(cfg.hydra.launcher), runs)


def _sweep_run(cfg: DictConfig, overrides: list[str]) -> GrpoRun | SftRun:
    run = convert(cfg, overrides)
    if isinstance(run, GrpoRun) and run.resume not in (None, "auto"):
        raise ValueError(f"resume={run.resume} continues one run, and a sweep continues by itself: leave it out")
    return run


def _resume_folder(command: Command, overrides: list[str]) -> str | None:
    """The folder in resume=<folder> on the command line."""
    given = given_value("resume", overrides) if command is TRAIN else None
    return os.path.expanduser(given) if isinstance(given, str) and given not in ("auto", "") else None


def _folder(cfg: DictConfig, key: str) -> Path:
    """The folder named by hydra.run.dir, hydra.sweep.dir or hydra.sweep.subdir."""
    try:
        name = str(OmegaConf.select(cfg.hydra, key, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ValueError(f"hydra.{key}: {str(error).splitlines()[0]}: try hydra.{key}=FOLDER") from error
    if not name:
        raise ValueError(f"hydra.{key} is empty: try hydra.{key}=FOLDER")
    if "${" in os.path.abspath(name):
        raise ValueError(f"hydra.{key}={name}: Hydra cannot work in a folder whose path holds a literal ${{: choose another one")
    return Path(name if key == "sweep.subdir" else os.path.expanduser(name))


def _run_dir(cfg: DictConfig, run: GrpoRun | SftRun) -> Path:
    """Where a single run goes: the folder given, the one to continue, or a new one named after the time."""
    folder = _folder(cfg, "run.dir")
    named_by_time = "${now:" in OmegaConf.to_container(cfg.hydra.run, resolve=False)["dir"]
    resume = run.resume if isinstance(run, GrpoRun) else None
    if resume not in (None, "auto"):
        resume = os.path.expanduser(resume)
        if not named_by_time and folder.resolve() != Path(resume).resolve():
            raise ValueError(f"resume={resume} continues in that folder, not in hydra.run.dir={folder}: drop hydra.run.dir")
        folder = Path(resume)
        runfolder.load(folder)
    elif resume == "auto" and named_by_time:
        unfinished = runfolder.newest_unfinished(folder.parent, run)
        if unfinished is None:
            print(f"resume=auto: no unfinished run of this config in {folder.parent}, so a new one starts")
        folder = unfinished or _claim(folder)
    elif named_by_time:
        return _claim(folder)
    runfolder.check(folder, run, bool(resume))
    return _make(folder)


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the folder {folder}: {error.strerror}: choose another one with hydra.run.dir=FOLDER") from error
    return folder


def _claim(folder: Path) -> Path:
    """A folder that no other run has, even one started in the same second."""
    _make(folder.parent)
    number = 1
    while True:
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            number += 1
        except OSError as error:
            raise OSError(f"cannot make the folder {candidate}: {error.strerror}: choose another one with hydra.run.dir=FOLDER") from error


def _relative(folder: str) -> Path:
    path = Path(folder)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _parse(command: Command, argv: list[str]):
    """Hydra's own arguments; unlike Hydra it takes flags anywhere among the overrides."""
    parser = get_args_parser()
    options = [option for action in parser._actions for option in action.option_strings]

    def refuse(message: str):
        unknown = [word for word in argv if word.startswith("-") and word.split("=")[0] not in options]
        if "unrecognized" in message and unknown:
            flag = unknown[0]
            near = difflib.get_close_matches(flag.split("=")[0], options, 1, 0.7)
            advice = f"try {flag.lstrip('-')}" if "=" in flag else f"did you mean {near[0]}?" if near else f"see {command.script} --help"
            message = f"{flag} is not a flag: {advice}"
        raise ValueError(message)

    parser.error = refuse
    args = parser.parse_intermixed_args(argv)
    chosen = [name for name in ("run", "multirun", "cfg", "info", "shell_completion") if getattr(args, name)]
    if len(chosen) > 1:
        raise ValueError(f"--{chosen[0]} and --{chosen[1]} do not go together: keep one of them".replace("_", "-"))
    if args.resolve and not args.cfg and not args.help:
        raise ValueError("--resolve goes with --cfg: try --cfg job --resolve")
    return args


# --- help --------------------------------------------------------------------------------------------------------------


def _help(command: Command) -> str:
    """Read from the config files themselves, so that it cannot be out of date."""
    config = OmegaConf.load(CONF / f"{TRAIN.config if command is EVAL else command.config}.yaml")
    chosen = {group: option for entry in config.defaults if isinstance(entry, DictConfig) for group, option in entry.items()}
    lines = [_about(command), ""]
    if command.own_keys:
        lines += ["Any key of the run can be overridden: grpo-train --help lists them."]
        return "\n".join(lines)
    lines += ["Config groups (GROUP=OPTION, the default first):"]
    for group, option in chosen.items():
        others = sorted((p.stem for p in (CONF / group).glob("[!_]*.yaml") if p.stem != option), key=lambda o: (len(o), o))
        lines += textwrap.wrap(", ".join([option, *others]), 100, initial_indent=f"  {group:<12}", subsequent_indent=" " * 14)
    own = {key: value for key, value in config.items() if key not in ("defaults", *chosen)}
    keys = [f"{name}={'null' if value is None else str(value).lower()}" for name, value in _flat(own)]
    lines += ["", "Keys of the run (KEY=VALUE; keys of a group are GROUP.KEY=VALUE, such as kl.beta=0.1):"]
    lines += textwrap.wrap("  ".join(k.replace(" ", "") for k in keys), 100, initial_indent="  ", subsequent_indent="  ")
    usage = {
        "--cfg job [overrides]": "show the whole config instead of running it",
        "-cd FOLDER -cn NAME": f"run FOLDER/NAME.yaml: a recipe (-cd recipes/{command.config} -cn NAME), a run again (-cd RUN -cn config)",
        "-m KEY=A,B": "a sweep: one run for each combination (hydra/launcher=isolated: several at once, each in a process of its own)",
        "hydra.run.dir=FOLDER": "choose the run folder (of a sweep: hydra.sweep.dir=FOLDER)",
    }
    if command is SCORE:
        return "\n".join([*lines, "", f"{command.script} -cd FOLDER -cn NAME   the rules and keys of FOLDER/NAME.yaml"])
    if command is PLAN:
        return "\n".join([*lines, "", f"{command.script} -cd FOLDER -cn NAME   the plan of FOLDER/NAME.yaml: a recipe, or a run's config"])
    if command is TRAIN:
        usage["resume=auto"] = "continue the newest unfinished run of this config (or resume=FOLDER)"
    lines += ["", *(f"{command.script} {words:<22} {what}" for words, what in usage.items())]
    return "\n".join(
        [*lines, "", f'Hydra\'s own help: {command.script} --hydra-help; shell completion: eval "$({command.script} -sc install=bash)"']
    )


def _about(command: Command) -> str:
    own = ["", f"Its own arguments: {command.own_keys}"] if command.own_keys else []
    return "\n".join([*textwrap.wrap(command.about, 100), "", "Examples:", *(f"  {example}" for example in command.examples), *own])


def _flat(values: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, (dict, DictConfig)):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
