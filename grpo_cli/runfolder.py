"""A run's folder: who may write into it, the config.yaml that repeats the run, the summary.json that says how it stands.

Knows nothing of training, torch or Hydra.
"""

import contextlib
import fcntl
import json
import math
import os
import platform
import re
import time
import traceback
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_cli.config import GrpoRun, SftRun
from grpo_cli.runtime import versions

BASE = {GrpoRun: "_grpo", SftRun: "_sft"}
DONE = ("finished", "stopped")

# Keys that may change between the parts of one run.
# Of stop the metric is fixed, since it chose the best checkpoint so far.
FREE = ["steps", "stop", "eval_every", "save_every", "keep_checkpoints", "sample_every", "log_every", "tracker", "resume", "debug"]


def write_text(path: Path, text: str) -> None:
    """All or nothing: a reader never sees half a file, and a full disk leaves the old one whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, obj: Any) -> None:
    write_text(path, json.dumps(finite(obj), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """NaN and infinities become None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def values(cfg: Any) -> Any:
    """The plain values of a config: dataclasses to dicts, enums to names."""
    if is_dataclass(cfg):
        return {f.name: values(getattr(cfg, f.name)) for f in fields(cfg)}
    if isinstance(cfg, Enum):
        return cfg.name
    if isinstance(cfg, dict):
        return {key: values(value) for key, value in cfg.items()}
    if isinstance(cfg, (list, tuple)):
        return [values(value) for value in cfg]
    return cfg


def _escaped(value: Any) -> Any:
    """Text that holds a literal ${ must not become an interpolation when it is read back."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def to_yaml(cfg: GrpoRun | SftRun) -> str:
    """A config file of its own: `-cd <folder> -cn config` gives the same config again.

    It stands on the schema, not on the defaults: a reward rule that the run had dropped must not come back.
    """
    content = {"defaults": [BASE[type(cfg)], "_self_"], **values(cfg)}
    if "resume" in content:
        content["resume"] = None  # repeating a run is not continuing it
    return "# Every value of this run. Repeat it with -cd <this folder> -cn config\n" + OmegaConf.to_yaml(
        OmegaConf.create(_escaped(content))
    )


def load(folder: str | Path) -> dict:
    """The values in a run's config.yaml."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"not a run folder: {folder} has no config.yaml: name the folder that holds config.yaml and summary.json")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ValueError(f"not a run folder: {path} cannot be read: {' '.join(str(error).split())}") from None
    defaults = content.pop("defaults", None) if isinstance(content, dict) else None
    if not isinstance(defaults, list) or defaults[:1] not in [[base] for base in BASE.values()]:
        raise ValueError(f"not a run folder: {path} was not written by a run")
    return content


def identity(values: dict) -> dict:
    """What must be equal for a run to be continued."""
    stop = values.get("stop")
    metric = {"stop.metric": stop.get("metric")} if isinstance(stop, dict) else {}
    return {key: value for key, value in values.items() if key not in FREE} | metric


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Dotted keys that differ, each with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        inner = [differences(old.get(k, "absent"), new.get(k, "absent"), f"{key}.{k}" if key else k) for k in {**old, **new}]
        return [line for lines in inner for line in lines]
    return [] if old == new else [f"{key} was {old}, is now {new}"]


def summary(folder: Path) -> dict:
    """The run's summary.json; empty when there is none, or none that can be read."""
    try:
        content = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def objective(folder: Path) -> float | None:
    """The metric that a run was to raise, at its best evaluation, for sweepers that optimise; None when it did not end well."""
    found = summary(folder)
    best = (found.get("evaluation") or {}).get("best") if found.get("status") in DONE else None
    return best[load(folder)["stop"]["metric"]] if best else None


def in_use(folder: Path) -> bool:
    """Some process holds the folder's lock."""
    try:
        with open(folder / ".lock", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def check(folder: Path, cfg: GrpoRun | SftRun, resume: bool) -> None:
    """Refuse a folder that holds another run, the same one when it is not to be continued, or anything else that could be lost."""
    elsewhere = "choose another folder (hydra.run.dir=FOLDER, for a sweep hydra.sweep.dir=FOLDER)"
    if not holds_run(folder):
        # A start that failed at once leaves these.
        left = (".lock", "error.log", "job.log", *(("summary.json",) if summary(folder).get("status") else ()))
        others = sorted(entry.name for entry in folder.iterdir() if entry.name not in left) if folder.is_dir() else []
        if others:
            raise ValueError(f"{folder} holds files and no run ({', '.join(others[:5])}{', ...' if len(others) > 5 else ''}): {elsewhere}")
        return
    if not resume:
        again = " or continue it with resume=auto" if isinstance(cfg, GrpoRun) else ""
        raise ValueError(f"{folder} already holds a run: {elsewhere}{again}")
    differing = differences(identity(load(folder)), identity(values(cfg)))
    if differing:
        more = f" (and {len(differing) - 5} more)" if len(differing) > 5 else ""
        raise ValueError(f"{folder} holds a run of another config: {'; '.join(differing[:5])}{more}: {elsewhere}, or give the old values")
    taken = [int(entry.name[5:]) for entry in (folder / "checkpoints").glob("step_*") if re.fullmatch("step_[0-9]+", entry.name)]
    if max(taken, default=0) > cfg.steps:
        raise ValueError(f"{folder} has taken {max(taken)} steps already, more than steps={cfg.steps}: try steps={max(taken)}")


def is_done(folder: Path, cfg: GrpoRun | SftRun) -> bool:
    """The folder holds this very run, ended as it should."""
    if not holds_run(folder) or summary(folder).get("status") not in DONE:
        return False
    old, new = load(folder), values(cfg)
    return identity(old) == identity(new) and all(old.get(key) == new.get(key) for key in ("steps", "stop"))


def newest_unfinished(root: Path, cfg: GrpoRun) -> Path | None:
    """The run below root that was started last, has the same identity and did not end as it should."""
    files = sorted(root.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime, reverse=True)
    for folder in (file.parent for file in files):
        with contextlib.suppress(ValueError):  # somebody else's config.yaml
            if summary(folder).get("status") not in DONE and identity(load(folder)) == identity(values(cfg)):
                return folder
    return None


def reason(error: BaseException) -> str:
    """One line for the user: our own messages as they are, others with their type."""
    return str(error) if isinstance(error, (ValueError, OSError)) and str(error) else f"{type(error).__name__}: {error}"


def log_traceback(folder: Path, error: BaseException) -> None:
    """To error.log; a full disk must not hide the error itself."""
    with contextlib.suppress(OSError), open(folder / "error.log", "a", encoding="utf-8") as file:
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n{''.join(traceback.format_exception(error))}")


def record_failure(folder: Path, error: BaseException) -> None:
    """The traceback to error.log, the reason to summary.json."""
    log_traceback(folder, error)
    with contextlib.suppress(OSError):
        write_json(folder / "summary.json", {**summary(folder), "status": "failed", "reason": reason(error)})


class RunFolder:
    """The folder while this process works in it: locked, with config.yaml and summary.json written.

    Leaving by an exception, SystemExit too, writes status failed (an interrupt: interrupted) and the reason.
    """

    def __init__(self, path: Path, cfg: GrpoRun | SftRun, overrides: list[str], resume: bool):
        self.path, self.cfg, self.overrides, self.resume = Path(path), cfg, overrides, resume
        self.values: dict = values(cfg)
        self.summary: dict = {}

    def __enter__(self) -> "RunFolder":
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "a+", encoding="utf-8")
        except OSError as error:
            raise OSError(f"cannot write into {self.path}: {error.strerror}: choose another hydra.run.dir") from error
        try:
            self._take_lock()
            check(self.path, self.cfg, self.resume)
            if holds_run(self.path):
                self.summary = summary(self.path)
                self.summary.pop("log_end", None)
            write_text(self.path / "config.yaml", to_yaml(self.cfg))
            self.update(
                status="running",
                reason=None,
                started=self.summary.get("started", time.strftime("%Y-%m-%dT%H:%M:%S%z")),
                seed=self.cfg.seed,
                overrides=self.overrides,
                versions=versions(),
            )
        except BaseException:
            self._lock.close()
            raise
        return self

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "another process"
            raise ValueError(f"{self.path} is in use by {owner}: wait for it, or choose another hydra.run.dir") from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {platform.node()}")
        self._lock.flush()

    def update(self, **changes: Any) -> None:
        """Merge into summary.json."""
        self.summary = {**self.summary, **changes}
        write_json(self.path / "summary.json", self.summary)

    def __exit__(self, _kind, error: BaseException | None, _traceback) -> None:
        try:
            if isinstance(error, KeyboardInterrupt):
                with contextlib.suppress(OSError):
                    self.update(status="interrupted", reason=type(error).__name__)
            elif error is not None:
                record_failure(self.path, error)
        finally:
            self._lock.close()
