"""The machine a run stands on: device, threads, memory, versions, and a polite reaction to signals."""

import importlib.metadata
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path


def pick_device(name: str):
    """The torch device for `device`: auto prefers cuda, then mps, then cpu. ValueError when it is not there."""
    import torch

    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name}: this machine has {torch.cuda.device_count()} CUDA devices: try device=auto")
    if device.type == "mps" and not has_mps:
        raise ValueError("device=mps is not available here: try device=auto")
    return device


def use_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def peak_memory_gib(device) -> float:
    """Largest memory so far: of the CUDA device's tensors, elsewhere of the process."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def versions() -> dict[str, str]:
    packages = ("grpo-cli", "torch", "transformers", "peft", "hydra-core", "wandb")
    return {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages if _installed(p)}


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def script(name: str) -> str:
    """What to type for one of this package's commands: its name, or its path when the environment is not activated."""
    beside = Path(sys.executable).parent / name
    return name if shutil.which(name) or not beside.exists() else os.path.relpath(beside)


_PLAIN = re.compile(r"(?!(?:null|true|false|inf|nan)\Z)[A-Za-z_/][\w./-]*", re.ASCII | re.IGNORECASE)
"""Values that Hydra and the shell read as they stand."""


def hydra_text(key: str, value: object) -> str:
    """key=VALUE in Hydra's override grammar, for any text: resume=outputs/a, resume='my runs/a'."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))  # a literal ${ is no interpolation
    if _PLAIN.fullmatch(text):
        return f"{key}={text}"
    inner = re.sub(r"(\\*)'", r"\1\1\\'", text)  # backslashes count before a quote only, and at the end
    return f"{key}='{inner}{inner[len(inner.rstrip(chr(92))) :]}'"


def hydra_override(key: str, value: object) -> str:
    """The same to be pasted into a shell: "resume='my runs/a'"."""
    text = hydra_text(key, value)
    return f'"{text}"' if "'" in text and not set(text) & set('"$`\\!') else shlex.quote(text)


class Interrupts:
    """Turns SIGINT and SIGTERM into a flag that the loop reads between steps; a second signal ends the process at once."""

    def __init__(self):
        self.received: str | None = None
        self._previous = {}

    def __enter__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number, _frame):
        if self.received:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


class Stopwatch:
    """Seconds of the parts of one step; a part that ends more than once is added up."""

    def __init__(self):
        self._started = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._started

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": seconds for name, seconds in (self.laps | {"step": self.total}).items()}
