"""Evaluate a checkpoint of a run on held-out problems, with as many samples as asked for."""

import hashlib
from pathlib import Path

from grpo_cli import checkpoint
from grpo_cli.config import GrpoRun
from grpo_cli.data import load_problems
from grpo_cli.evaluation import evaluate
from grpo_cli.policy import load_policy, sampled_from
from grpo_cli.rewards import Rules
from grpo_cli.rollout import check_native
from grpo_cli.runfolder import write_json
from grpo_cli.runtime import pick_device, use_threads


def run(cfg: GrpoRun, folder: Path, which: str, overrides: list[str]) -> dict:
    """The evaluation's metrics, also written to <folder>/evaluations/, a file per checkpoint and set of overrides.

    The run's own files stay as they are.
    """
    found = checkpoint.find(folder, which)
    use_threads(cfg.threads)
    policy = load_policy(cfg.model, pick_device(cfg.device), cfg.seed, sampled_from(cfg.rollout), cfg.rollout.engine, reference=False)
    policy.load_weights(checkpoint.read(found)["policy"])
    _, problems, _ = load_problems(cfg.data)
    prompts, _ = policy.encode(problems, cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens)
    if not prompts:
        raise ValueError(f"no held-out prompt fits: try a larger data.max_prompt_tokens (now {cfg.data.max_prompt_tokens})")
    check_native(policy, prompts[0], 1, cfg.rollout, cfg.seed)
    with Rules(cfg.reward, cfg.device) as rules:
        metrics, _ = evaluate(policy, prompts, rules, cfg.evaluation, cfg.rollout, cfg.seed)
    (folder / "evaluations").mkdir(exist_ok=True)
    under = "-" + hashlib.sha256("\0".join(sorted(overrides)).encode()).hexdigest()[:8] if overrides else ""
    file = folder / "evaluations" / f"{found.name}{under}.json"
    write_json(file, {"checkpoint": found.name, "overrides": overrides, "problems": len(prompts), **metrics})
    return {"checkpoint": found.name, "file": str(file), **metrics}
