"""Checkpoints that are whole or absent: written under another name, then renamed. Knows nothing of what a step is."""

import contextlib
import os
import re
import shutil
from pathlib import Path

import torch

from grpo_cli.policy import Policy

STATE = "state.pt"


def save(run_dir: Path, step: int, policy: Policy, optimizer, schedule, state: dict, keep: int, best_step: int | None) -> None:
    """checkpoints/step_NNNNNN, then the pointers `last` and `best`, then old ones away: the newest `keep` and the best stay.

    Raises OSError when it cannot be written; what was there before is whole then.
    """
    root = run_dir / "checkpoints"
    folder = _folder(root, step)
    draft = root / f".writing-{folder.name}"
    try:
        root.mkdir(exist_ok=True)
        if not _is_whole(folder):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            policy.save(draft / policy.saved_as)
            tensors = {"policy": policy.weights(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "state": state}
            with open(draft / STATE, "wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())
            shutil.rmtree(folder, ignore_errors=True)  # what an incomplete copy or a damaged disk may have left
            draft.rename(folder)
        point(run_dir, step, best_step)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if not isinstance(error, Exception):
            raise
        # A full disk is an OSError to Python, a RuntimeError to torch and a class of its own to safetensors.
        raise OSError(f"could not save the checkpoint of step {step} in {root} ({error}): earlier checkpoints are whole") from error
    _clean(root, keep, best_step)


def point(run_dir: Path, last_step: int, best_step: int | None) -> None:
    """Let `last` and `best` point at these steps; a best whose folder is gone falls back to the last."""
    root = run_dir / "checkpoints"
    best = last_step if best_step is None or not _is_whole(_folder(root, best_step)) else best_step
    for name, step in (("last", last_step), ("best", best)):
        link, draft = root / name, root / f".writing-{name}"
        if link.is_dir() and not link.is_symlink():  # a copy that followed the links
            shutil.rmtree(link)
        draft.unlink(missing_ok=True)
        draft.symlink_to(_folder(root, step).name)
        os.replace(draft, link)


def load(folder: Path, policy: Policy, optimizer, schedule) -> dict:
    """Put everything back as it was and return the loop's own state."""
    tensors = read(folder)
    policy.load_weights(tensors["policy"])
    optimizer.load_state_dict(tensors["optimizer"])
    schedule.load_state_dict(tensors["schedule"])
    # The saved rate belongs to the old number of steps; a run that was made longer goes on along its new schedule.
    schedule._last_lr = [base * factor(schedule.last_epoch) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, lr in zip(optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = lr
    return tensors["state"]


def read(folder: Path) -> dict:
    try:
        return torch.load(folder / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds on a damaged file
        raise ValueError(
            f"{folder / STATE} cannot be read ({error}): delete that folder to continue from the checkpoint before it"
        ) from error


def newest(run_dir: Path) -> Path | None:
    """The newest whole checkpoint; half-written ones do not count."""
    whole = _whole(run_dir / "checkpoints")
    return whole[-1] if whole else None


def find(run_dir: Path, which: str) -> Path:
    """The checkpoint called `best`, `last`, by its step, or by its folder. ValueError lists those there are."""
    root = run_dir / "checkpoints"
    folder = _folder(root, int(which)) if re.fullmatch("[0-9]+", which) else root / which
    if which not in ("best", "last") and not _is_whole(folder):
        folder = Path(which)
    if not _is_whole(folder):
        there = [f.name for f in _whole(root)]
        raise ValueError(f"checkpoint={which}: {run_dir} has {', '.join(there) or 'no checkpoints'}: try checkpoint=last or a step number")
    return folder.resolve()


def step_of(folder: Path) -> int:
    return int(folder.resolve().name.removeprefix("step_"))


def export(run_dir: Path, policy: Policy, which: str) -> Path:
    """Copy the trained adapter (or model) of a checkpoint to the run folder, where people look for it."""
    target, draft = run_dir / policy.saved_as, run_dir / f".writing-{policy.saved_as}"
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(find(run_dir, which) / policy.saved_as, draft)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    return target


def _folder(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def _is_whole(folder: Path) -> bool:
    return (folder / STATE).is_file()


def _whole(root: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    folders = [folder for folder in root.glob("step_*") if re.fullmatch("step_[0-9]+", folder.name) and _is_whole(folder)]
    return sorted(folders, key=step_of)


def _clean(root: Path, keep: int, best_step: int | None) -> None:
    best = [] if best_step is None else [_folder(root, best_step)]
    for folder in _whole(root)[:-keep]:
        if folder not in best:
            doomed = root / f".old-{folder.name}"  # renamed first, so that no half-deleted folder passes for a checkpoint
            with contextlib.suppress(OSError):
                folder.rename(doomed)
    for leftover in root.glob(".*-step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
