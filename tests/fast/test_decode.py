from collections import Counter

import numpy as np
import pytest
import torch
from models import encoded, model_section, rollout_section

from grpo_cli.batch import collate
from grpo_cli.config import Engine, Truncated
from grpo_cli.fast.decode import _best_width, _cost
from grpo_cli.policy import Distribution, load_policy
from grpo_cli.randomness import uniforms
from grpo_cli.rollout import sample

CPU = torch.device("cpu")
QUESTIONS = ["1+1=", "a longer prompt 22+33=", "7=", "12+34=", "9", "thirty characters of prompt 22="]


def completions(policy, G, rows_at_once, T=40, questions=QUESTIONS):
    prompts = encoded(policy, *questions)
    draws = uniforms(1, "rollout", 1, len(prompts), G, T)
    groups = sample(policy, prompts, G, rollout_section(max_new_tokens=T, rows_at_once=rows_at_once), draws)
    return [c for group in groups for c in group.completions]


@pytest.mark.parametrize("G", [1, 3, 8, 16])
def test_entering_leaving_and_moving_change_no_token(model_folder, G):
    policy = load_policy(model_section(model_folder), CPU, 1, Distribution(1.0))
    policy.eos_ids = [2, 30]  # often enough that rows end all along
    together = completions(policy, G, 1000)
    assert len({len(c.token_ids) for c in together}) > 2
    assert [c.token_ids for c in completions(policy, G, 1000, questions=QUESTIONS[:1])] == [c.token_ids for c in together[:G]]
    for rows_at_once in (17, 5, 1):
        found = completions(policy, G, rows_at_once)
        assert [c.token_ids for c in found] == [c.token_ids for c in together]
        gaps = [abs(a - b) for c, d in zip(found, together, strict=True) for a, b in zip(c.logprobs, d.logprobs, strict=True)]
        assert max(gaps) < 1e-5


def test_both_engines_sample_the_same_tokens(model_folder):
    native, plain = (load_policy(model_section(model_folder), CPU, 1, Distribution(0.8, 20, 0.9), engine) for engine in Engine)
    for G, rows in ((4, 1000), (4, 6)):
        pairs = zip(completions(native, G, rows), completions(plain, G, rows), strict=True)
        assert all(a.token_ids == b.token_ids and np.allclose(a.logprobs, b.logprobs, atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize("T", [1, 2])
def test_the_shortest_completions_end_at_the_limit(model_folder, T):
    policy = load_policy(model_section(model_folder), CPU, 1, Distribution(1.0))
    assert {len(c.token_ids) for c in completions(policy, 3, 7, T)} <= {1, T}


def test_lines_are_as_wide_as_pays():
    assert _best_width([8, 8, 8], 8) == 8  # 3 lines of 8: cost 27
    assert _best_width([1, 1, 1, 1], 8) == 1
    assert _best_width([8, 3, 3, 1], 8) == 4  # 2 + 1 + 1 + 1 lines of 4
    assert _cost([8, 3, 3, 1], 4) == 25
    assert _best_width([6], 6) == 6


@pytest.mark.parametrize(
    "distribution",
    [Distribution(0.7), Distribution(1.0), Distribution(1.3), Distribution(1.0, 5), Distribution(1.0, 0, 0.8), Distribution(1.3, 12, 0.7)],
)
@pytest.mark.parametrize("engine", Engine)
def test_tokens_are_drawn_as_often_as_the_model_says(model_folder, distribution, engine):
    policy = load_policy(model_section(model_folder), CPU, 1, distribution, engine)
    (prompt,) = encoded(policy, "12+34=")
    n = 20_000
    draws = np.random.default_rng(7).random((1, n, 1), dtype=np.float32)
    (group,) = sample(policy, [prompt], n, rollout_section(max_new_tokens=1, rows_at_once=n), draws)
    counts = Counter(c.token_ids[0] for c in group.completions)

    # The model's probabilities, cut and tempered here by hand.
    with torch.no_grad():
        logits = policy.lm(input_ids=torch.tensor([prompt.prompt_ids])).logits[0, -1].double() / distribution.temperature
    logits[policy._forbidden] = -torch.inf
    order = logits.argsort(descending=True).tolist()
    order = order[: distribution.top_k or len(order)]
    share = dict(zip(order, logits[order].softmax(0).tolist(), strict=True))
    held, kept = 0.0, []
    for token in order:
        if held < distribution.top_p:
            kept.append(token)
        held += share[token]
    total = sum(share[token] for token in kept)
    expected = {token: share[token] / total for token in kept if share[token] > 0}

    assert set(counts) <= set(expected)
    for c in group.completions[:500]:
        assert c.logprobs[0] == pytest.approx(np.log(expected[c.token_ids[0]]), abs=1e-5)
    # Pearson's chi-square over cells of at least five expected draws; its mean is k and its standard deviation sqrt(2 k).
    cells = [token for token in expected if n * expected[token] >= 5]
    rest = n - sum(counts[token] for token in cells)
    expected_rest = n * (1 - sum(expected[token] for token in cells))
    chi = sum((counts[t] - n * expected[t]) ** 2 / (n * expected[t]) for t in cells)
    chi += (rest - expected_rest) ** 2 / expected_rest if expected_rest > 1e-6 * n else 0.0
    assert len(cells) > 2 and chi < len(cells) + 4 * (2 * len(cells)) ** 0.5


@pytest.mark.parametrize("distribution", [Distribution(1.0, 5), Distribution(1.2, 0, 0.8)])
@pytest.mark.parametrize("engine", Engine)
def test_scores_are_those_of_the_cut_distribution_that_was_sampled(model_folder, distribution, engine):
    policy = load_policy(model_section(model_folder), CPU, 1, distribution, engine)
    prompts = encoded(policy, *QUESTIONS)
    groups = sample(policy, prompts, 4, rollout_section(), uniforms(1, "rollout", 1, len(prompts), 4, 12))
    batch = collate(groups, policy.pad_id, Truncated.keep)
    scores = policy.token_logprobs(batch)
    assert (scores.logprobs_BT - batch.sampled_logprobs_BT).abs().max() < 1e-5
    if distribution.top_k:
        assert scores.entropy_BT.max() <= np.log(5) + 1e-5


def test_a_token_that_rounding_would_cut_off_stays_possible(model_folder):
    policy = load_policy(model_section(model_folder), CPU, 1, Distribution(1.0, 1))
    logits = torch.tensor([[0.0, 0.0, 2.0, 1.0, 3.0, 1.5]])
    policy._forbidden = torch.tensor([0])
    assert policy.next_token_logprobs(logits)[0].exp().tolist() == [0, 0, 0, 0, 1, 0]
    scored = policy.next_token_logprobs(logits, torch.tensor([3]))[0].exp()
    assert scored[3].item() == pytest.approx(1 / (1 + np.exp(2)))
