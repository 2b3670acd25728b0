"""One contender on one setting, in a process of its own, started by bench.py; prints one line of JSON.

Either trains with LoRA on the same prompts, every completion equally long, and times whole steps behind a step for warming up. Rewards of
this project are made in a process apart, whose time is not counted: less than 1 % of a step.
"""

import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from floor import RANK
from material import make_model, model_path, prompts, share_of_e

BETA, LR = 0.04, 1e-5


class Clock:
    """Seconds of steps and of their parts: CPU seconds of this process, or wall seconds where a GPU does the work."""

    def __init__(self, device: str):
        self.steps: list[dict[str, float]] = []
        self._parts: dict[str, float] = {}
        self._cuda = device == "cuda"
        self._began = self._wall = 0.0

    def now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() if self._cuda else time.process_time()

    def start(self) -> None:
        self._parts = dict.fromkeys(("rollout", "reference", "update"), 0.0)
        self._began, self._wall = self.now(), time.perf_counter()

    def stop(self) -> None:
        seconds = self.now() - self._began
        other = seconds - sum(self._parts.values())
        self.steps.append({"step": seconds, "wall": time.perf_counter() - self._wall} | self._parts | {"other": other})

    def part(self, name: str, owner, method: str, counts: Callable[[], bool] = lambda: True) -> None:
        """Add the time of calls of owner.method to the part, those on which `counts`."""
        original = getattr(owner, method)

        def timed(*args, **kwargs):
            if not (self._parts and counts()):
                return original(*args, **kwargs)
            began = self.now()
            result = original(*args, **kwargs)
            self._parts[name] += self.now() - began
            return result

        setattr(owner, method, timed)


def ours(setting: dict, model: Path, texts: list[str], device: str, clock: Clock, scratch: Path) -> None:
    """grpo-train as it is, but for an end token that no draw can give."""
    from grpo_cli import collect
    from grpo_cli.cli import TRAIN
    from grpo_cli.compose import Composer, convert
    from grpo_cli.policy import Policy
    from grpo_cli.runtime import hydra_text
    from grpo_cli.stages import grpo
    from grpo_cli.tracking import Tracker

    for name, rows in (("train", texts), ("heldout", texts[:1])):
        lines = (json.dumps({"question": text, "answer": "1"}) + "\n" for text in rows)
        (scratch / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    steps = 1 + setting["steps"]
    overrides = [
        *("model=hf", hydra_text("model.path", model), f"model.micro_batch_tokens={setting['micro_batch_tokens']}"),
        *("data=jsonl", hydra_text("data.path", scratch / "train.jsonl"), hydra_text("data.eval.path", scratch / "heldout.jsonl")),
        *("data.prompt.chat=false", f"data.max_prompt_tokens={setting['S']}"),
        *("reward=exact", "+reward.rules.e.fn=material:share_of_e_in", "reward.gate.mode=off", "reward.workers=1"),
        f"group_size.samples_per_prompt={setting['G']}",
        f"group_size.completions_per_step={setting['P'] * setting['G']}",
        *(f"rollout.max_new_tokens={setting['T']}", f"rollout.rows_at_once={setting['rows_at_once']}"),
        *(f"algorithm.updates_per_rollout={setting['updates']}", f"kl.beta={BETA}", f"model.lora.rank={RANK}"),
        *(f"optimizer.lr={LR}", "optimizer.schedule=constant", "optimizer.warmup_steps=0"),
        *(f"steps={steps}", f"eval_every={steps}", f"save_every={steps}", "evaluation.samples_per_problem=1", "evaluation.pass_at=[1]"),
        *("tracker=none", f"device={device}"),
    ]
    with Composer(TRAIN, None, None) as composer:
        cfg = convert(composer.compose(overrides), overrides)
    load_policy, collect_groups, write_rows = grpo.load_policy, grpo.collect, Tracker.step

    def load_endless(*args, **kwargs) -> Policy:
        policy = load_policy(*args, **kwargs)
        policy.eos_ids = [2**31 - 1]
        return policy

    def first_of_a_step(*args, **kwargs):
        clock.start()
        got = collect_groups(*args, **kwargs)
        check(setting, [(len(group.encoded.prompt_ids), len(c.token_ids)) for group in got.groups for c in group.completions])
        return got

    def last_of_a_step(*args, **kwargs) -> None:
        write_rows(*args, **kwargs)
        clock.stop()

    grpo.load_policy, grpo.collect, Tracker.step = load_endless, first_of_a_step, last_of_a_step
    clock.part("rollout", collect, "sample")
    clock.part("reference", Policy, "annotate")
    clock.part("update", grpo, "improve")
    grpo.run(cfg, scratch / "run", overrides)


def trl(setting: dict, model: Path, texts: list[str], device: str, clock: Clock, scratch: Path, compact_head: bool) -> None:
    """TRL's GRPOTrainer at the micro-batch that suits it best; compact_head has it score completions only, as it does on GPUs."""
    import trl.trainer.utils
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    if compact_head:
        trl.trainer.utils._use_triton = lambda device: True  # asked by the head alone; the kernels have a test of their own
    updates, micro, cuda = setting["updates"], setting["trl_micro_batch"], device == "cuda"
    rollout = {"num_generations": setting["G"], "max_completion_length": setting["T"]}
    rollout |= {"generation_kwargs": {"min_new_tokens": setting["T"]}}
    batch = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": setting["P"] * setting["G"] // micro}
    steps = {"num_iterations": updates, "max_steps": (1 + setting["steps"]) * updates}
    training = {"beta": BETA, "learning_rate": LR, "lr_scheduler_type": "constant", "gradient_checkpointing": False}
    numbers = {"model_init_kwargs": {"dtype": "bfloat16" if cuda else "float32"}, "bf16": cuda, "use_cpu": not cuda}
    logging = {"output_dir": str(scratch), "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    config = GRPOConfig(**rollout, **batch, **steps, **training, **numbers, **logging)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(str(model), share_of_e, config, Dataset.from_dict({"prompt": texts}), peft_config=lora)
    generate = trainer._generate_single_turn

    def generate_checked(prompt_ids, *args, **kwargs):
        generated = generate(prompt_ids, *args, **kwargs)
        check(setting, [(len(prompt), len(ids)) for prompt, ids in zip(prompt_ids, generated[0], strict=True)])
        return generated

    class Steps(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            clock.start()

        def on_step_end(self, args, state, control, **_):
            if state.global_step % updates == 0:
                clock.stop()
                clock.start()

    trainer._generate_single_turn = generate_checked
    clock.part("rollout", trainer, "_generate_single_turn")
    clock.part("reference", trainer, "_get_per_token_logps_and_entropies", counts=lambda: not torch.is_grad_enabled())
    clock.part("update", trainer, "compute_loss")
    clock.part("update", trainer.accelerator, "backward")
    trainer.add_callback(Steps())
    trainer.train()


def check(setting: dict, lengths: list[tuple[int, int]]) -> None:
    """Every pair of prompt and completion is as long as the setting says."""
    assert set(lengths) == {(setting["S"], setting["T"])}, f"other lengths than asked for: {set(lengths)}"


def machine(clock: Clock, device: str) -> dict:
    """The core or the GPU, what it does on one large matrix product, and how fast it reads or copies a large array."""
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (2048, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    source, target, vector = (torch.ones(shape, device=device) for shape in ((2**15, 2**12), (2**15, 2**12), 2**12))

    def fastest(work: Callable) -> float:
        times = [clock.now()]
        for _ in range(6):
            work()
            times.append(clock.now())
        return min(after - before for before, after in pairwise(times))

    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    name = torch.cuda.get_device_name() if device == "cuda" else f"one core of {cpu.group(1) if cpu else platform.processor()}"
    bandwidth = 4 * source.numel() / min(fastest(lambda: source @ vector), fastest(lambda: target.copy_(source)) / 2)
    return {"device": device, "name": name, "gflops": 2 * n**3 / fastest(lambda: a @ b) / 1e9, "gbs": bandwidth / 1e9}


def main() -> None:
    from transformers import AutoTokenizer

    from grpo_cli.runtime import peak_memory_gib

    what, device = sys.argv[1], "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    clock = Clock(device)
    if what == "machine":
        print(json.dumps(machine(clock, device)))
        return
    setting, cache = json.loads(sys.argv[2]), Path(sys.argv[3])
    model = model_path(setting["model"], cache)
    if what == "model":
        print(json.dumps(str(make_model(setting["model"], model, device))))
        return
    texts = prompts(AutoTokenizer.from_pretrained(model), setting["P"] * (1 + setting["steps"]), setting["S"])
    with tempfile.TemporaryDirectory() as scratch:
        if what == "ours":
            ours(setting, model, texts, device, clock, Path(scratch))
        else:
            trl(setting, model, texts, device, clock, Path(scratch), compact_head=what == "trl_compact_head")
    print(json.dumps({"steps": clock.steps[1:], "peak_mb": round(1024 * peak_memory_gib(torch.device(device)))}))


if __name__ == "__main__":
    main()
