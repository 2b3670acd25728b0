"""Supervised training on demonstrations: the warm start that a GRPO run stands on.

The loss counts completion tokens only, the end token among them. The model, or the adapter alone, is saved in its library's own form.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from grpo_cli.batch import pad, take, to_device
from grpo_cli.config import Demos, Engine, SftRun
from grpo_cli.data import read_rows
from grpo_cli.demos import TEACHERS
from grpo_cli.optim import build_optimizer
from grpo_cli.policy import Distribution, Policy, load_policy
from grpo_cli.randomness import generator, permutation
from grpo_cli.records import Batch, Problem
from grpo_cli.runfolder import RunFolder
from grpo_cli.runtime import Interrupts, peak_memory_gib, pick_device, use_threads

Encoded = tuple[list[int], list[int]]
"""A demonstration's prompt ids and completion ids, the end token included."""


def run(cfg: SftRun, run_dir: Path, overrides: list[str] | None = None) -> dict:
    """Train, save into `run_dir`/model (with LoRA: /adapter) and return the summary."""
    with Interrupts() as interrupts, RunFolder(run_dir, cfg, overrides or [], resume=False) as folder:
        return _train(cfg, folder, interrupts)


def _train(cfg: SftRun, folder: RunFolder, interrupts: Interrupts) -> dict:
    use_threads(cfg.threads)
    device = pick_device(cfg.device)
    policy = load_policy(cfg.model, device, cfg.seed, Distribution(1.0), Engine.transformers, reference=False)
    draw = demonstrations(policy, cfg.demos, cfg.batch_size, cfg.seed)
    optimizer, lr_schedule = build_optimizer(policy.trainable.values(), cfg.optimizer, cfg.steps)
    folder.update(device=str(device), threads=cfg.threads)
    started, tokens = time.perf_counter(), 0

    with open(folder.path / "metrics.jsonl", "w", encoding="ascii", buffering=1) as metrics:
        for step in range(1, cfg.steps + 1):
            if interrupts.received:
                print(f"interrupted by {interrupts.received} after step {step - 1}, nothing saved", flush=True)
                raise KeyboardInterrupt(interrupts.received)
            batch = to_device(collate(draw(step), policy.pad_id), device)
            optimizer.zero_grad()
            loss = completion_loss(policy, batch)
            if not math.isfinite(loss):
                raise ValueError(f"the loss is {loss} at step {step}: try an optimizer.lr below {cfg.optimizer.lr:g}")
            torch.nn.utils.clip_grad_norm_(policy.trainable.values(), cfg.optimizer.grad_clip or math.inf)
            lr = lr_schedule.get_last_lr()[0]
            optimizer.step()
            lr_schedule.step()
            tokens += int(batch.completion_lengths_B.sum())
            seconds = time.perf_counter() - started
            metrics.write(json.dumps({"step": step, "loss": loss, "lr": lr, "tokens": tokens, "time_s": seconds}) + "\n")
            if step % cfg.log_every == 0 or step == cfg.steps:
                print(f"step {step}/{cfg.steps}  loss {loss:.4f}  lr {lr:.1e}  {seconds:.0f} s", flush=True)

    saved = folder.path / ("model" if cfg.model.lora is None else "adapter")
    policy.save(saved)
    folder.update(status="finished", steps=cfg.steps, loss=loss, tokens=tokens, training_seconds=round(seconds, 2))
    folder.update(saved=saved.name, peak_memory_gib=round(peak_memory_gib(device), 3))
    print(f"saved in {saved}")
    return folder.summary


def completion_loss(policy: Policy, batch: Batch) -> float:
    """Mean -log p over the batch's completion tokens; its gradient is added up over the micro-batches."""
    total_tokens, loss = int(batch.completion_lengths_B.sum()), 0.0
    for rows in policy.micro_batches(batch):
        logprobs_BT = policy.token_logprobs(take(batch, rows)).logprobs_BT  # 0 behind the end
        part = -logprobs_BT.sum() / total_tokens
        part.backward()
        loss += part.item()
    return loss


def demonstrations(policy: Policy, section: Demos, batch_size: int, seed: int) -> Callable[[int], list[Encoded]]:
    """A function from the step to its batch of (prompt ids, completion ids): fresh ones, or the file's rows in a new order each epoch."""
    if section.source in TEACHERS:

        def fresh(step: int):
            rng = generator(seed, "demos", step)
            return encode(policy, [TEACHERS[section.source](rng, section) for _ in range(batch_size)], section, "demonstration")

        return fresh

    rows = encode(policy, pairs(read_rows(section.path, key="demos.path"), section), section, f"{section.path}: row")

    def drawn(step: int):
        places = range((step - 1) * batch_size, step * batch_size)
        orders = {epoch: permutation(seed, "demos", epoch, len(rows)) for epoch in {place // len(rows) for place in places}}
        return [rows[orders[place // len(rows)][place % len(rows)]] for place in places]

    return drawn


def pairs(rows: list[dict], section: Demos) -> list[tuple[str, str]]:
    """Prompt and completion of every row; ValueError names the first row without them."""
    for number, row in enumerate(rows, start=1):
        for key, name in (("prompt_field", section.prompt_field), ("completion_field", section.completion_field)):
            if not isinstance(row.get(name), str) or not row[name].strip():
                state = "is empty or no text" if name in row else f"is missing (there are: {', '.join(row)})"
                raise ValueError(f"{section.path}: row {number}: the field {name} {state}: mend the row, or try demos.{key}=NAME")
    return [(row[section.prompt_field], row[section.completion_field]) for row in rows]


def encode(policy: Policy, texts: list[tuple[str, str]], section: Demos, where: str) -> list[Encoded]:
    """Token ids as the policy will meet them: the prompt as in a rollout, the completion with the end token behind it."""
    tokenizer, eos_id = policy.tokenizer, policy.tokenizer.eos_token_id
    if section.chat and not tokenizer.chat_template:
        raise ValueError("demos.chat=true, but the model has no chat template: try demos.chat=false, or an instruct model")
    window = getattr(policy.lm.config, "max_position_embeddings", None) or 2**31
    prompts = [[{"role": "user", "content": prompt}] if section.chat else prompt for prompt, _ in texts]
    problems = [Problem(id=str(number), prompt=prompt, answer="") for number, prompt in enumerate(prompts, start=1)]
    fitting, _ = policy.encode(problems, max_prompt_tokens=window, max_new_tokens=0)
    prompt_ids = {encoded.problem.id: encoded.prompt_ids for encoded in fitting}
    never = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id} - {eos_id}
    rows = []
    for problem, (_, completion) in zip(problems, texts, strict=True):
        ids = [*tokenizer(completion, add_special_tokens=False)["input_ids"], eos_id]
        if problem.id not in prompt_ids or len(prompt_ids[problem.id]) + len(ids) > window:
            raise ValueError(f"{where} {problem.id}: prompt and completion do not fit the model's window of {window} tokens: shorten it")
        if never & set(ids):
            raise ValueError(f"{where} {problem.id}: the model's tokenizer has no token for a part of the completion {completion!r}")
        rows.append((prompt_ids[problem.id], ids))
    return rows


def collate(rows: list[Encoded], pad_id: int) -> Batch:
    """Demonstrations as a batch; nobody sampled them, so there are no log-probs of then and no advantages."""
    prompts, completions = zip(*rows, strict=True)
    completion_ids_BT = pad(completions, pad_id)
    return Batch(
        group_B=torch.arange(len(rows)),
        prompt_ids_BS=pad(prompts, pad_id, left=True),
        prompt_lengths_B=torch.tensor([len(p) for p in prompts]),
        completion_ids_BT=completion_ids_BT,
        completion_lengths_B=torch.tensor([len(c) for c in completions]),
        trained_B=torch.ones(len(rows), dtype=torch.bool),
        sampled_logprobs_BT=torch.zeros(completion_ids_BT.shape),
    )
