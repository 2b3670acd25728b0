"""Held-out evaluation: greedy and sampled accuracy, pass@k and reward, each with its n and standard error."""

from math import comb, nan
from typing import Any

from torch import Tensor

from grpo_cli.config import Evaluation, Rollout
from grpo_cli.policy import Policy
from grpo_cli.randomness import uniforms
from grpo_cli.records import EncodedProblem
from grpo_cli.rewards import Rules, score
from grpo_cli.rollout import sample


def evaluate(
    policy: Policy,
    prompts: list[EncodedProblem],
    rules: Rules,
    evaluation: Evaluation,
    rollout: Rollout,
    seed: int,
) -> tuple[dict[str, float], dict[str, Any]]:
    """The metrics, and how often each problem was solved.

    Every problem is tried once greedily and evaluation.samples_per_problem times at the training temperature.
    The uniforms are the same at every evaluation of a run, so two of its checkpoints are compared on paired draws. eval/accuracy is
    the sampled accuracy. Standard errors of sampled figures are over problems, since samples of one problem are no independent evidence;
    of one problem they are NaN. ValueError when the accuracy rule judges none of the completions.
    """
    G = evaluation.samples_per_problem
    greedy = score(rules, sample(policy, prompts, 1, rollout, None))
    draws_PGT = uniforms(seed, "evaluation", 0, len(prompts), G, rollout.max_new_tokens)
    groups = sample(policy, prompts, G, rollout, draws_PGT)
    sampled = score(rules, groups)
    accuracy = rules.section.accuracy
    if all(scores.rule_PG[accuracy].isnan().all() for scores in (greedy, sampled)):
        raise ValueError(
            f"the accuracy rule {accuracy} does not apply to any held-out problem (numeric, for one, judges no answer that is a text): "
            f"try another rule, such as reward.rules.{accuracy}.fn=package.module:function"
        )
    right_PG = sampled.right_PG.double()

    metrics = _with_error("eval/accuracy", right_PG.mean(dim=1), right_PG.numel())
    metrics |= _with_error("eval/accuracy_greedy", greedy.right_PG.double()[:, 0], len(prompts))
    for k in evaluation.pass_at:
        metrics |= _with_error(f"eval/pass@{k}", pass_at(right_PG.sum(dim=1), G, k), len(prompts))
    metrics |= _with_error("eval/reward", sampled.total_PG.double().mean(dim=1), right_PG.numel())
    for name, rule_PG in sampled.rule_PG.items():
        metrics[f"eval/rule/{name}"] = rule_PG.double().nanmean().item()
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    ids, right_P = [prompt.problem.id for prompt in prompts], sampled.right_PG.sum(dim=1).tolist()
    solved = {"greedy": dict(zip(ids, greedy.right_PG[:, 0].int().tolist(), strict=True)), "sampled": dict(zip(ids, right_P, strict=True))}
    return metrics | {"eval/tokens": sum(lengths) / len(lengths)}, {"samples": G, **solved}


def pass_at(right_P: Tensor, n: int, k: int) -> Tensor:
    """(P,) chance that k of a problem's n samples hold a right one: 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374, eq. 1)."""
    return right_P.clone().apply_(lambda c: 1 - comb(n - int(c), k) / comb(n, k))


def _with_error(name: str, values_P: Tensor, n: int) -> dict[str, float]:
    error = values_P.std().item() / len(values_P) ** 0.5 if len(values_P) > 1 else nan
    return {name: values_P.mean().item(), f"{name}_se": error, f"{name}_n": n}
