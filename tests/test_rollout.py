from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import encoded, model_section, random_llama, rollout_section, shake

from grpo_cli.batch import collate, pad
from grpo_cli.config import Truncated
from grpo_cli.policy import Distribution, load_policy
from grpo_cli.randomness import uniforms
from grpo_cli.records import END, Ended
from grpo_cli.rollout import _inverse_cdf, sample, token_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy(model_folder):
    policy = load_policy(model_section(model_folder), CPU, seed=1, distribution=Distribution(1.0))
    shake(policy)
    return policy


def tokens(groups):
    return [[c.token_ids for c in group.completions] for group in groups]


def test_batching_and_compaction_do_not_change_what_is_sampled(policy):
    prompts = encoded(policy, "1+1=", "a longer prompt 22+33=", "7=", "12+34=")
    draws = uniforms(1, "rollout", 1, 4, 4, 12)
    together = sample(policy, prompts, 4, rollout_section(), draws)
    one_by_one = sample(policy, prompts, 4, rollout_section(rows_at_once=1), draws)
    assert tokens(together) == tokens(one_by_one)
    alone = sample(policy, prompts[1:2], 4, rollout_section(), draws[1:2])
    assert tokens(alone) == tokens(together[1:2])


def test_greedy_takes_the_most_likely_token_of_a_plain_forward(policy):
    (prompt,) = encoded(policy, "12+34=")
    ids = list(prompt.prompt_ids)
    with policy.sampling():
        for _ in range(12):
            logits = policy.lm(input_ids=torch.tensor([ids])).logits[:, -1]
            ids.append(policy.next_token_logprobs(logits).argmax().item())
            if ids[-1] in policy.eos_ids:
                break
    greedy = sample(policy, [prompt], 1, rollout_section(), None)[0].completions[0]
    assert greedy.token_ids == ids[len(prompt.prompt_ids) :]


def test_completions_end_with_the_end_token_or_at_the_limit(policy):
    groups = sample(policy, encoded(policy, "1+1=", "22+33="), 16, rollout_section(), uniforms(2, "rollout", 1, 2, 16, 12))
    completions = [c for group in groups for c in group.completions]
    assert {c.ended for c in completions} == {Ended.eos, Ended.length}
    for c in completions:
        assert len(c.logprobs) == len(c.token_ids) <= 12
        assert (c.token_ids[-1] in policy.eos_ids) == (c.ended is Ended.eos)
        assert not set(c.token_ids[:-1]) & set(policy.eos_ids)
        assert "<eos>" not in c.text and len(c.text) == len(c.token_ids) - (c.ended is Ended.eos)


def test_recorded_log_probs_are_those_of_the_training_forward_at_any_temperature(model_folder):
    for temperature in (0.6, 1.0, 1.3):
        policy = load_policy(model_section(model_folder), CPU, seed=1, distribution=Distribution(temperature))
        shake(policy)
        prompts = encoded(policy, "1+1=", "a much longer prompt than that 5+5=")
        groups = sample(policy, prompts, 4, rollout_section(temperature), uniforms(1, "rollout", 1, 2, 4, 12))
        batch = collate(groups, policy.pad_id, Truncated.keep)
        with torch.no_grad():
            scored_BT = policy.token_logprobs(batch).logprobs_BT
        assert (scored_BT - batch.sampled_logprobs_BT).abs().max().item() < 1e-4


def test_frequencies_follow_the_models_probabilities(policy):
    # One token from one prompt, 20,000 times: chi-square over the tokens expected at least five times.
    (prompt,) = encoded(policy, "12+34=")
    n = 20_000
    groups = sample(policy, [prompt], n, rollout_section(max_new_tokens=1, rows_at_once=n), uniforms(4, "rollout", 1, 1, n, 1))
    drawn = np.bincount([c.token_ids[0] for c in groups[0].completions], minlength=len(policy.tokenizer))
    with policy.sampling():
        expected = policy.next_token_logprobs(policy.lm(input_ids=torch.tensor([prompt.prompt_ids])).logits[:, -1]).exp()[0].numpy() * n
    often = expected >= 5
    chi_square = ((drawn - expected)[often] ** 2 / expected[often]).sum()
    # mean k - 1, standard deviation sqrt(2 (k - 1)): within five of them
    k = often.sum()
    assert chi_square < k - 1 + 5 * np.sqrt(2 * (k - 1))
    assert drawn[[0, 1]].sum() == 0  # pad and bos are never drawn


def test_a_head_wider_than_the_tokenizer_never_yields_an_unknown_id(tmp_path):
    policy = load_policy(model_section(random_llama(tmp_path, vocabulary=64)), CPU, seed=1, distribution=Distribution(1.0))
    assert len(policy.tokenizer) < 64
    groups = sample(policy, encoded(policy, "1+1="), 64, rollout_section(), uniforms(1, "rollout", 1, 1, 64, 12))
    assert max(max(c.token_ids) for c in groups[0].completions) < len(policy.tokenizer)


def test_a_place_in_the_text_belongs_to_the_token_that_completes_it(policy):
    # One token per character: the first k characters are complete with token k - 1. The end token is one more.
    ids = [*policy.tokenizer("7+5=12 8")["input_ids"], policy.eos_ids[0]]
    assert [token_of(policy, ids, end) for end in (1, 2, 6, 8)] == [0, 1, 5, 7]
    assert token_of(policy, ids, END) == 8


def test_a_token_of_several_characters_holds_every_place_within_it(policy):
    class Words:
        def decode(self, ids, **_):
            return "".join(["ab", "", "cde", "f"][number] for number in ids)

    stub = SimpleNamespace(tokenizer=Words())
    assert [token_of(stub, [0, 1, 2, 3], end) for end in range(1, 7)] == [0, 0, 2, 2, 2, 3]


def test_inverse_cdf_never_takes_a_token_of_probability_zero():
    logprobs = torch.log_softmax(torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]), dim=1)
    draws = torch.tensor([0.0, 0.4999999, 0.5, 0.99999994])
    assert _inverse_cdf(logprobs.expand(4, 5), draws).tolist() == [1, 1, 3, 3]


def test_merging_for_the_rollout_leaves_every_weight_as_it_was(policy):
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    with policy.sampling():
        pass
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    assert all(p.requires_grad == (name in policy.trainable) for name, p in policy.model.named_parameters())


def test_padding_goes_to_the_side_asked_for():
    assert pad([[1, 2, 3], [4]], 0).tolist() == [[1, 2, 3], [4, 0, 0]]
    assert pad([[1, 2, 3], [4]], 0, left=True).tolist() == [[1, 2, 3], [0, 0, 4]]
