"""Checkpoints that are whole or absent: written under another name, then renamed. Knows nothing of what a step is."""

import contextlib
import os
import shutil
from pathlib import Path

import torch

from grpo_cli.policy import Policy

STATE = "state.pt"


def save(run_dir: Path, step: int, policy: Policy, optimizer, schedule, state: dict, keep: int, best_step: int | None) -> None:
    """checkpoints/step_NNNNNN, then the pointers `last` and `best`, then old ones away: the newest `keep` and the best stay."""
    root = run_dir / "checkpoints"
    root.mkdir(exist_ok=True)
    folder = _folder(root, step)
    if not _is_whole(folder):
        draft = root / f".writing-{folder.name}"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir()
            policy.save(draft / policy.saved_as)
            tensors = {"policy": policy.weights(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "state": state}
            with open(draft / STATE, "wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())
            shutil.rmtree(folder, ignore_errors=True)  # what an incomplete copy or a damaged disk may have left
            draft.rename(folder)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            shutil.rmtree(draft, ignore_errors=True)
            raise OSError(f"could not save the checkpoint of step {step} in {root} ({error}): earlier checkpoints are whole") from error
    _point(root / "last", folder)
    if best_step is not None and _is_whole(_folder(root, best_step)):
        _point(root / "best", _folder(root, best_step))
    _clean(root, keep, best_step)


def load(folder: Path, policy: Policy, optimizer, schedule) -> dict:
    """Put everything back as it was and return the loop's own state."""
    tensors = read(folder)
    policy.load_weights(tensors["policy"])
    optimizer.load_state_dict(tensors["optimizer"])
    schedule.load_state_dict(tensors["schedule"])
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
    whole = [folder for folder in sorted((run_dir / "checkpoints").glob("step_*")) if _is_whole(folder)]
    return whole[-1] if whole else None


def find(run_dir: Path, which: str) -> Path:
    """The checkpoint called `best`, `last` or by its step. ValueError lists those there are."""
    folder = run_dir / "checkpoints" / (which if which in ("best", "last") else f"step_{int(which):06d}" if which.isdigit() else which)
    if not _is_whole(folder):
        there = [f.name for f in sorted((run_dir / "checkpoints").glob("step_*")) if _is_whole(f)]
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


def _point(link: Path, folder: Path) -> None:
    draft = link.with_name(f".writing-{link.name}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(folder.name)
    os.replace(draft, link)


def _clean(root: Path, keep: int, best_step: int | None) -> None:
    whole = [folder for folder in sorted(root.glob("step_*")) if _is_whole(folder)]
    best = [] if best_step is None else [_folder(root, best_step)]
    for folder in whole[:-keep]:
        if folder not in best:
            doomed = root / f".old-{folder.name}"  # renamed first, so that no half-deleted folder passes for a checkpoint
            with contextlib.suppress(OSError):
                folder.rename(doomed)
    for leftover in root.glob(".*-step_*"):
        shutil.rmtree(leftover, ignore_errors=True)
