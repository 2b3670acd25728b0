"""A job that loads no torch: tracker.run_name says what it does, steps how many tenths of a second it takes."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from grpo_cli.compose import convert
from grpo_cli.runfolder import RunFolder
from grpo_cli.runtime import Interrupts


def job(cfg):
    run, path = convert(cfg, []), Path(HydraConfig.get().runtime.output_dir)
    with Interrupts() as interrupts, RunFolder(path, run, [], resume=True) as folder:
        print("at work", flush=True)
        match run.tracker.run_name:
            case "abort":
                os.abort()
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(0)
            case "raise":
                raise ZeroDivisionError("this reward raises")
        seen = {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES"), "begin": time.time(), "stdin": sys.stdin.read()}
        for _ in range(run.steps):
            time.sleep(0.1)
            if interrupts.received and run.tracker.run_name != "stubborn":
                folder.update(status="interrupted", reason=interrupts.received)
                break
        else:
            with open(path / "seen.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({**seen, "end": time.time()}) + "\n")
            folder.update(status="finished", evaluation={"best": {"step": 1, "eval/accuracy": 0.75}})
    if folder.summary["status"] == "interrupted":
        raise KeyboardInterrupt
    return True
