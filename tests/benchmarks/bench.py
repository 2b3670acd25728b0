"""make bench: seconds and memory of one step, of this project and of TRL's GRPOTrainer on the same work, beside the least it could take.

Every contender runs in a process of its own on one core (or one GPU), in turns. Writes outputs/bench/<time>/bench.json.
"""

import argparse
import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from floor import floors
from material import model_path
from rich.console import Console
from rich.table import Table

from grpo_cli.runtime import versions

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "outputs" / "bench"
ENVIRONMENT = {
    "PYTHONPATH": str(HERE),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # glibc otherwise maps and unmaps every large tensor, which costs either contender up to a third of a step.
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}


@dataclass(frozen=True)
class Setting:
    """One rollout: P prompts of S tokens, G completions of T tokens for each; then the updates."""

    model: str
    P: int
    G: int
    S: int
    T: int
    peers: tuple[str, ...] = ("trl",)
    updates: int = 1
    steps: int = 2
    """Timed in each process, behind one for warming up."""
    rounds: int = 2
    """Processes of each contender."""
    micro_batch_tokens: int = 8192
    """Ours, as in conf/model."""
    rows_at_once: int = 512
    trl_micro_batch: int = 16
    """TRL's best of those tried."""


def once(model: str, P: int, G: int, S: int, T: int, peers: tuple[str, ...] = (), **budgets: int) -> Setting:
    return Setting(model, P, G, S, T, peers, steps=1, rounds=1, **budgets)


LLAMA, SIZES = "random_3.2m", ("embedded", "random_3.2m", "random_26m", "smollm2")
SETTINGS = {
    "tiny": Setting(LLAMA, 8, 8, 64, 64),
    "tiny_2_updates": Setting(LLAMA, 8, 8, 64, 64, updates=2),
    "tiny_long_prompt": Setting(LLAMA, 4, 16, 256, 64),
    "embedded": Setting("embedded", 8, 8, 64, 64),
    "smollm2": Setting("smollm2", 2, 8, 128, 32, ("trl", "trl_compact_head"), steps=1, micro_batch_tokens=1024, trl_micro_batch=4),
    **{f"grid/p{S}_c{T}_g{G}": once(LLAMA, 32 // G, G, S, T, ("trl",)) for S in (32, 256) for T in (32, 128) for G in (4, 16)},
    **{f"samples/{G}": once(LLAMA, 4, G, 128, 64) for G in (2, 4, 8, 16, 32)},
    **{f"length/{T}": once(LLAMA, 4, 8, 64, T) for T in (32, 64, 128, 256)},
    **{f"size/{model}": once(model, 2, 8, 64, 32) for model in SIZES},
    # Both budgets, of training and of decoding, hold 32 of these completions: with more of them the peak must not grow.
    **{f"memory/{8 * P}": once("random_3.2m_49k", P, 8, 32, 32, micro_batch_tokens=2048, rows_at_once=32) for P in (4, 8, 16, 32)},
    "cuda/0.5b": Setting("qwen2_0.5b", 32, 8, 512, 512, steps=1, micro_batch_tokens=16_384),
    "cuda/1.5b": Setting("qwen2_1.5b", 32, 8, 512, 512, steps=1, micro_batch_tokens=16_384),
}
QUICK = ("tiny", "embedded", "cuda/0.5b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", metavar="NAME", help=f"names, or patterns such as 'grid/*', of: {', '.join(SETTINGS)}")
    parser.add_argument("--quick", action="store_true", help=f"one round only, of {', '.join(QUICK)} unless settings are named")
    args = parser.parse_args()
    print("measuring the machine", flush=True)
    machine = child("machine")
    cuda = machine["device"] == "cuda"
    here = [name for name in SETTINGS if name.startswith("cuda/") == cuda]
    for pattern in args.settings or ():
        if not fnmatch.filter(here, pattern):
            parser.error(f"there is no setting {pattern} for this device (there are: {', '.join(here)}): try --settings {here[0]}")
    wanted = args.settings or (QUICK if args.quick else ["*"])

    has_trl = importlib.util.find_spec("trl") is not None
    trl_version = importlib.metadata.version("trl") if has_trl else None
    head = {"date": time.strftime("%Y-%m-%d %H:%M"), "machine": machine, "versions": versions() | {"trl": trl_version}}
    folder, rows = OUT / time.strftime("%Y-%m-%d_%H-%M-%S"), []
    folder.mkdir(parents=True)
    for name in here:
        if not any(fnmatch.fnmatch(name, pattern) for pattern in wanted):
            continue
        rounds = 1 if args.quick else SETTINGS[name].rounds
        try:
            rows += measure(name, SETTINGS[name], rounds, has_trl, machine)
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
        (folder / "bench.json").write_text(json.dumps(head | {"rows": rows}, indent=1), encoding="utf-8")
    print_table(head, rows, "wall" if cuda else "CPU")
    if not has_trl:
        print("TRL is not installed, so its columns are empty: try pip install 'trl>=1.16,<1.17'")
    print(folder / "bench.json")


def child(what: str, *arguments: str) -> dict:
    """What contender.py prints. RuntimeError with its last words when it fails."""
    command = [sys.executable, str(HERE / "contender.py"), what, *arguments]
    ran = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError("\n".join([f"{what} failed:", *ran.stderr.splitlines()[-12:]]))
    return json.loads(ran.stdout.splitlines()[-1])


def measure(name: str, setting: Setting, rounds: int, has_trl: bool, machine: dict) -> list[dict]:
    """One row, or one per variant of TRL. A contender that fails has no figures, and its error is shown."""
    arguments, model = (json.dumps(asdict(setting)), str(OUT / "models")), model_path(setting.model, OUT / "models")
    if not model.exists():
        print(f"making {model}", flush=True)
        child("model", *arguments)
    runs: dict[str, list[dict]] = {contender: [] for contender in ("ours", *(setting.peers if has_trl else ()))}
    for turn in range(rounds):
        for contender, results in runs.items():
            try:
                results.append(child(contender, *arguments))
                result = f"{results[-1]['steps'][-1]['step']:.2f} s"
            except RuntimeError as error:
                result = str(error)
            print(f"{name}: {contender}, round {turn + 1} of {rounds}: {result}", flush=True)
    floor = floors(model, setting.P, setting.G, setting.S, setting.T, setting.updates, machine)
    ours, rows = figures("ours", runs["ours"], setting.updates), []
    for peer in setting.peers or ("trl",):
        theirs = figures("trl", runs.get(peer, []), setting.updates)
        both = ours["ours_s"] and theirs["trl_s"]
        row = {"setting": name + peer.removeprefix("trl")} | ours | theirs | {"ratio": both and theirs["trl_s"] / ours["ours_s"]}
        row |= floor | {"share_of_floor": ours["ours_s"] and floor["floor_s"] / ours["ours_s"]}
        rows.append(row | {"work": asdict(setting) | {"rounds": rounds}})
    return rows


def figures(who: str, results: list[dict], updates: int) -> dict:
    """Medians over all steps of all processes, per optimizer step; None without any."""
    steps = [step for result in results for step in result["steps"]]
    median = {part: statistics.median(step[part] for step in steps) / updates for part in steps[0]} if steps else {}
    seconds = {f"{who}_s": median.pop("step", None), f"{who}_wall_s": median.pop("wall", None)}
    return seconds | {f"{who}_split": median or None, f"{who}_mb": max((result["peak_mb"] for result in results), default=None)}


def print_table(head: dict, rows: list[dict], clock: str) -> None:
    machine = head["machine"]
    title = f"{clock} seconds per optimizer step, {machine['name']} ({machine['gflops']:.0f} GFLOP/s, {machine['gbs']:.0f} GB/s)"
    table = Table(
        title=f"{title}, {head['date']}", caption="split: rollout / passes without gradient / update; floor: the least work known"
    )
    for column in ("setting", "ours", "split", "TRL", "split", "ratio", "ours MB", "TRL MB", "floor", "of floor"):
        table.add_column(column, justify="left" if column == "setting" else "right", no_wrap=True)

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    for row in rows:
        cells = [row["setting"]]
        for who in ("ours", "trl"):
            split = row[f"{who}_split"] or {}
            cells += [shown(row[f"{who}_s"], ".3g"), " / ".join(shown(split.get(p), ".2f") for p in ("rollout", "reference", "update"))]
        cells += [shown(row["ratio"], ".2f"), shown(row["ours_mb"], "d"), shown(row["trl_mb"], "d")]
        table.add_row(*cells, shown(row["floor_s"], ".3g"), shown(row["share_of_floor"], ".0%"))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    main()
