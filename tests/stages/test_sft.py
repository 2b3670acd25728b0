import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from models import model_section

from grpo_cli.batch import micro_batches
from grpo_cli.config import Demos, DemoSource, Lora, LrSchedule, Optimizer, OptimizerName, SftRun
from grpo_cli.policy import Distribution, load_policy
from grpo_cli.stages import sft
from grpo_cli.stages.sft import collate, completion_loss, demonstrations, encode, pairs, run

CPU = torch.device("cpu")
ROWS = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "12+34=", "completion": "46 ok"}, {"prompt": "a", "completion": "bcd"}]


def demos(path=None, **changes) -> Demos:
    source = DemoSource.rows if path else DemoSource.sloppy_addition
    values = {"prompt_field": "prompt", "completion_field": "completion", "chat": False, "digits": [2, 3], "holdout": 0.1}
    return Demos(source, path and str(path), **values | {"guess_frac": 0.65, "slip_frac": 0.015, "broken_tag_frac": 0.15} | changes)


def sft_run(model, section: Demos, **changes) -> SftRun:
    optimizer = Optimizer(OptimizerName.adamw, 1e-2, [0.9, 0.98], 0.0, 0.01, 1.0, LrSchedule.cosine, 5, 0.1)
    values = {"steps": 30, "batch_size": 16, "seed": 0, "threads": 1, "device": "cpu", "log_every": 10, "debug": False}
    return SftRun(model_section(model, lora=None), section, optimizer, **values | changes)


def jsonl(folder, rows):
    path = folder / "demos.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def policy_of(folder, lora=None, **changes):
    return load_policy(model_section(folder, lora=lora, **changes), CPU, 0, Distribution(1.0))


def batch_of(policy, rows=ROWS, **changes):
    section = demos("demos.jsonl", **changes)
    return collate(encode(policy, pairs(rows, section), section, "row"), policy.pad_id)


def gradient(policy, batch) -> torch.Tensor:
    policy.model.zero_grad()
    completion_loss(policy, batch)
    return torch.cat([p.grad.flatten() for p in policy.trainable.values()])


def test_the_loss_is_the_mean_over_completion_tokens_and_the_end_token_counts(model_folder):
    policy = policy_of(model_folder)
    expected, tokens = 0.0, 0
    for row in ROWS:
        prompt = policy.tokenizer(row["prompt"])["input_ids"]
        completion = [*policy.tokenizer(row["completion"], add_special_tokens=False)["input_ids"], policy.tokenizer.eos_token_id]
        logits = policy.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logits = logits.index_fill(1, torch.tensor([0, 1]), -torch.inf)  # padding and begin are never sampled, so never scored
        expected -= torch.log_softmax(logits, 1)[range(len(completion)), completion].sum().item()
        tokens += len(completion)
    assert tokens == 2 + 6 + 4
    assert completion_loss(policy, batch_of(policy)) == pytest.approx(expected / tokens, rel=1e-5)


def test_prompt_tokens_are_no_targets(model_folder):
    # With attention reduced to the token itself (no mixing, values zero), only the last prompt token can reach the loss: another
    # prompt before it must leave loss and gradient as they are, which it would not if prompt tokens were predicted.
    policy = policy_of(model_folder)
    with torch.no_grad():
        for layer in policy.lm.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    one = batch_of(policy, [{"prompt": "77777=", "completion": "82"}])
    other = batch_of(policy, [{"prompt": "abcde=", "completion": "82"}])
    frozen = [name for name in policy.trainable if "o_proj" in name]
    for name in frozen:
        policy.trainable.pop(name)
    assert torch.allclose(gradient(policy, one), gradient(policy, other), rtol=0, atol=1e-7)
    assert gradient(policy, one).abs().max() > 1e-3


@pytest.mark.parametrize("budget", [1, 16, 30])
def test_micro_batches_do_not_change_the_gradient(model_folder, budget):
    whole, cut = policy_of(model_folder), policy_of(model_folder, micro_batch_tokens=budget)
    batch = batch_of(whole, ROWS * 3)
    assert len(micro_batches(batch, budget)) > 1
    expected = gradient(whole, batch)
    assert (gradient(cut, batch) - expected).norm() <= 1e-6 * expected.norm()


def test_thirty_steps_lower_the_loss_and_leave_a_model_that_loads(model_folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = jsonl(tmp_path, ROWS)
    summary = run(sft_run(model_folder, demos(path)), tmp_path / "run")
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == list(range(1, 31)) and set(metrics[0]) == {"step", "loss", "lr", "tokens", "time_s"}
    assert metrics[-1]["loss"] < 0.2 < 2 < metrics[0]["loss"]
    assert summary["status"] == "finished" and json.loads((tmp_path / "run/summary.json").read_text()) == summary
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert AutoTokenizer.from_pretrained(tmp_path / "run/model")("1")["input_ids"]


def test_lora_saves_an_adapter_and_leaves_the_base_alone(model_folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    cfg = sft_run(model_folder, demos(jsonl(tmp_path, ROWS)), steps=3)
    run(replace(cfg, model=model_section(model_folder, lora=Lora(4, 8, "default", None))), tmp_path / "run")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "run/adapter")
    assert any(p.abs().max() > 0 for name, p in model.named_parameters() if "lora_B" in name)
    assert not (tmp_path / "run/model").exists()


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(model_folder, tmp_path):
    path = jsonl(tmp_path, ROWS * 9)

    def losses(name, seed):
        run(sft_run(model_folder, demos(path), steps=4, batch_size=4, seed=seed), tmp_path / name)
        return [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    assert losses("a", 1) == losses("b", 1) != losses("c", 2)


def test_rows_come_once_per_epoch_in_a_new_order_each(model_folder, tmp_path):
    policy = policy_of(model_folder)
    rows = [{"prompt": "p", "completion": letter} for letter in "abcdefgh"]
    draw = demonstrations(policy, demos(jsonl(tmp_path, rows)), 6, seed=0)
    drawn = [policy.tokenizer.decode(ids[:-1]) for step in range(1, 5) for _, ids in draw(step)]  # 24 = 3 epochs of 8
    epochs = [drawn[:8], drawn[8:16], drawn[16:]]
    assert all(sorted(epoch) == list("abcdefgh") for epoch in epochs) and epochs[0] != epochs[1]


def test_generated_demonstrations_depend_on_seed_and_step_alone():
    policy = policy_of("asset:tiny")
    draw, again, other = (demonstrations(policy, demos(), 4, seed) for seed in (0, 0, 1))
    assert draw(2) == again(2) and draw(2) != draw(1) and draw(2) != other(2)


def test_chat_puts_the_prompt_through_the_template_and_the_completion_behind_it(model_folder):
    policy = policy_of(model_folder)
    policy.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    ((prompt, completion),) = encode(policy, [("1+1=", "2")], demos("d.jsonl", chat=True), "row")
    assert policy.tokenizer.decode(prompt) == "<user>1+1=<a>"
    assert policy.tokenizer.decode(completion) == "2<eos>"


def test_chat_without_a_template_is_refused(model_folder):
    with pytest.raises(ValueError, match=r"demos\.chat=true.*no chat template.*demos\.chat=false"):
        batch_of(policy_of(model_folder), chat=True)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "1"}, r"row 2: the field completion is missing \(there are: prompt\).*demos\.completion_field"),
        ({"text": "1", "completion": "2"}, r"row 2: the field prompt is missing \(there are: text, completion\).*demos\.prompt_field"),
        ({"prompt": "1", "completion": " "}, r"row 2: the field completion is empty"),
        ({"prompt": "1", "completion": 2}, r"row 2: the field completion is .*no text"),
        ({"prompt": "1", "completion": "2" * 200}, r"row 2: .*window of 128 tokens"),
        ({"prompt": "1" * 200, "completion": "2"}, r"row 2: .*window of 128 tokens"),
        ({"prompt": "1", "completion": "2Ä"}, r"row 2: .*no token for .*'2Ä'"),
    ],
)
def test_a_bad_row_is_refused_by_number_before_training(model_folder, tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        run(sft_run(model_folder, demos(jsonl(tmp_path, [ROWS[0], row]))), tmp_path / "run")
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_and_saves_nothing(model_folder, tmp_path, monkeypatch, capsys, number):
    calls = []

    def interrupted(policy, batch):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return completion_loss(policy, batch)

    monkeypatch.setattr(sft, "completion_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(sft_run(model_folder, demos(jsonl(tmp_path, ROWS))), tmp_path / "run")
    assert f"interrupted by {number.name} after step 3, nothing saved\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "interrupted"
    assert not (tmp_path / "run/model").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing(model_folder, tmp_path):
    cfg = sft_run(model_folder, demos(jsonl(tmp_path, ROWS)))
    cfg = replace(cfg, optimizer=replace(cfg.optimizer, lr=1e30, grad_clip=0.0, warmup_steps=0))
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) at step \d+: try an optimizer\.lr below"):
        run(cfg, tmp_path / "run")
    assert not (tmp_path / "run/model").exists()
