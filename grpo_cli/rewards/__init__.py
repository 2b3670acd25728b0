"""The reward pipeline: every completion judged by every rule, and the verdicts weighed. Knows nothing of models or advantages."""

import math
from dataclasses import dataclass

from grpo_cli.config import Reward, Rule, RuleKind
from grpo_cli.records import END, Group, Sample, Scores
from grpo_cli.rewards.calling import FLOAT32_MAX, Failed, Verdict, mean, passes, shown
from grpo_cli.rewards.control import training_rules
from grpo_cli.rewards.pool import Pool
from grpo_cli.rewards.rules import NOT_APPLICABLE, NotApplicable

__all__ = ["NOT_APPLICABLE", "NotApplicable", "Rules", "score"]


class Rules:
    """The rules of a config, ready to judge. A context manager: it owns processes.

    Functions are called in worker processes; rules that are models judge here, on the device.
    """

    section: Reward

    def __init__(self, section: Reward, device: str = "auto"):
        """ValueError when a rule cannot be found, or cannot be called as the config says."""
        self.section = section
        self.training = training_rules(section)
        """The rules as training weighs them."""
        models = {name: rule for name, rule in section.rules.items() if rule.fn == "classifier"}
        for name, rule in section.rules.items():
            if rule.gate in models:
                raise ValueError(f"reward.rules.{name}.gate={rule.gate} is a model, and a model cannot be a gate: try another gate")
        self._models = _load_models(models, device) if models else {}
        self.pool = Pool(section, {name: rule for name, rule in section.rules.items() if name not in models})

    def __enter__(self) -> "Rules":
        return self

    def __exit__(self, *_) -> None:
        self.pool.close()

    @property
    def weights(self) -> dict[str, float]:
        """Of each rule in training."""
        return {name: rule.weight for name, rule in self.training.items()}

    def judge(self, samples: list[Sample], max_error_frac: float = 1.0) -> list[dict[str, Verdict]]:
        """Every rule's verdict on every sample. ValueError when a rule fails on more than max_error_frac of them."""
        verdicts_B = self.pool.judge(samples, max_error_frac)
        for name, model in self._models.items():
            gate = self.section.rules[name].gate
            open_B = [gate is None or passes(verdicts[gate]) for verdicts in verdicts_B]
            judged = iter(model.judge([sample for sample, is_open in zip(samples, open_B, strict=True) if is_open]))
            for verdicts, is_open in zip(verdicts_B, open_B, strict=True):
                verdicts[name] = next(judged) if is_open else [(END, 0.0)]
        return verdicts_B


def _load_models(rules: dict[str, Rule], device: str) -> dict:
    from grpo_cli.rewards.reward_model import Classifier
    from grpo_cli.runtime import pick_device

    loaded = {}
    for name, rule in rules.items():
        try:
            loaded[name] = Classifier(rule, pick_device(device), **rule.args)
        except (TypeError, ValueError) as error:
            raise ValueError(f"reward.rules.{name}: {error}") from error
    return loaded


def score(rules: Rules, groups: list[Group], training: bool = False) -> Scores:
    """Judge every completion by every rule, weighed as for training or as the config says.

    ValueError when a rule fails on more than reward.max_error_frac of them.
    """
    samples = samples_of(groups)
    verdicts_B = rules.judge(samples, rules.section.max_error_frac)
    return tally(rules.training if training else rules.section.rules, samples, verdicts_B, rules.section.accuracy, len(groups))


def samples_of(groups: list[Group]) -> list[Sample]:
    return [
        Sample(group.encoded.problem, group.encoded.prompt_text, completion.text, len(completion.token_ids), completion.ended)
        for group in groups
        for completion in group.completions
    ]


@dataclass(frozen=True)
class Weighed:
    """What the rules make of one completion."""

    values: dict[str, float]
    """Raw score per rule, NaN where it does not apply."""
    total: float
    """Weighted sum over the rules that apply, 0 where none does; a process rule counts by the mean of its steps."""
    steps: list[tuple[int, float]]
    """As in Scores.steps_B."""
    errors: dict[str, str]
    """What happened, for each rule that failed."""


def weigh(rules: dict[str, Rule], sample: Sample, verdicts: dict[str, Verdict]) -> Weighed:
    """ValueError when the total is too large a number."""
    values, steps, errors = {}, [], {}
    outcome, process, has_outcome = 0.0, 0.0, False
    for name, rule in rules.items():
        verdict = verdicts[name]
        if isinstance(verdict, Failed):
            errors[name] = verdict.reason
            verdict = [(END, rule.on_error)]
        values[name] = mean(verdict) if verdict else math.nan
        if not verdict or rule.weight == 0:
            continue
        if rule.kind is RuleKind.process:
            process += rule.weight * values[name]
            steps += [(end, rule.weight * reward) for end, reward in verdict]
        else:
            outcome, has_outcome = outcome + rule.weight * values[name], True
    if not abs(outcome + process) < FLOAT32_MAX:
        raise ValueError(f"the weighted rewards add up to {outcome + process}, too large a number; {shown(sample)}: lower the weights")
    return Weighed(values, outcome + process, [*sorted(steps), *([(END, outcome)] if has_outcome else [])], errors)


def tally(rules: dict[str, Rule], samples: list[Sample], verdicts_B: list[dict[str, Verdict]], accuracy: str, P: int) -> Scores:
    """Scores of the samples of P groups of equal size, in order."""
    import torch

    weighed_B = [weigh(rules, sample, verdicts) for sample, verdicts in zip(samples, verdicts_B, strict=True)]
    examples = {}
    for sample, weighed in zip(samples, weighed_B, strict=True):
        for name, reason in weighed.errors.items():
            examples.setdefault(name, f"reward rule {name!r} {reason}; {shown(sample)}")
    rule_PG = {name: torch.tensor([weighed.values[name] for weighed in weighed_B]).view(P, -1) for name in rules}
    return Scores(
        rule_PG,
        torch.tensor([weighed.total for weighed in weighed_B]).view(P, -1),
        rule_PG[accuracy] >= 1,
        [weighed.steps for weighed in weighed_B],
        {name: int(values.isnan().sum()) for name, values in rule_PG.items()},
        {name: sum(name in weighed.errors for weighed in weighed_B) for name in rules},
        examples,
        torch.tensor([bool(weighed.errors) or not weighed.steps for weighed in weighed_B]).view(P, -1),
    )
