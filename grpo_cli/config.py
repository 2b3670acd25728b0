"""The schema of a run: one dataclass per config group, with the checks that need no model.

Values live in `conf/`; a field here has no default, so a default is written once and a key nobody set is an error.
This module must not import torch: a config error is reported before anything heavy is loaded.
"""

import difflib
import math
import os
import re
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, Optional


class Dtype(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Engine(Enum):
    native = "native"
    transformers = "transformers"


class Source(Enum):
    addition = "addition"
    word_problems = "word_problems"
    sign_countdown = "sign_countdown"
    rows = "rows"


class Layout(Enum):
    plain = "plain"
    svamp = "svamp"
    countdown = "countdown"
    mbpp = "mbpp"
    humaneval = "humaneval"


class BadGold(Enum):
    refuse = "refuse"
    drop = "drop"


class Advantage(Enum):
    group_std = "group_std"
    group_mean = "group_mean"
    leave_one_out = "leave_one_out"
    batch_std = "batch_std"
    reinforce_pp = "reinforce_pp"
    reinforce_pp_baseline = "reinforce_pp_baseline"
    rank = "rank"
    process = "process"


class Combine(Enum):
    weigh_first = "weigh_first"
    normalise_first = "normalise_first"


class Ratio(Enum):
    token = "token"
    sequence = "sequence"


class Clip(Enum):
    ppo = "ppo"
    cispo = "cispo"
    none = "none"


class Std(Enum):
    sample = "sample"
    population = "population"


class Aggregation(Enum):
    sequence_mean = "sequence_mean"
    token_mean = "token_mean"
    constant = "constant"


class RuleKind(Enum):
    outcome = "outcome"
    process = "process"


class GateMode(Enum):
    warn = "warn"
    refuse = "refuse"
    off = "off"


class Control(Enum):
    none = "none"
    random = "random"
    format_only = "format_only"
    shuffled_gold = "shuffled_gold"


class Truncated(Enum):
    keep = "keep"
    mask = "mask"


class KlSchedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    adaptive = "adaptive"
    none = "none"


class Estimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"
    symmetric = "symmetric"
    exact = "exact"


class Anchor(Enum):
    reference = "reference"
    old = "old"


class Placement(Enum):
    loss = "loss"
    reward = "reward"


class KlGradient(Enum):
    plain = "plain"
    unbiased = "unbiased"


class OptimizerName(Enum):
    adamw = "adamw"
    adam = "adam"
    sgd = "sgd"


class LrSchedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class TrackerName(Enum):
    wandb = "wandb"
    none = "none"


class WandbMode(Enum):
    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


class DemoSource(Enum):
    sloppy_addition = "sloppy_addition"
    sign_countdown = "sign_countdown"
    rows = "rows"


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _positive(section: str, **values: Optional[float]) -> None:
    """Refuse zero and below; None means "not set" and passes."""
    for key, value in values.items():
        name = f"{section}.{key}" if section else key
        _require(value is None or value > 0, f"{name} must be above 0, not {value}: try {name}=1")


def _not_negative(section: str, **values: float) -> None:
    for key, value in values.items():
        name = f"{section}.{key}" if section else key
        _require(value >= 0, f"{name} must be 0 or above, not {value}: try {name}=0")


def _at_most(section: str, limit: int, **values: int) -> None:
    """Refuse numbers that no machine would ever finish; they are slips of the keyboard."""
    for key, value in values.items():
        name = f"{section}.{key}" if section else key
        _require(value <= limit, f"{name} must be at most {limit}, not {value}: try {name}={limit}")


MOST_STEPS = 10_000_000

INFINITY_MEANS_OFF = ("optimizer.grad_clip", "algorithm.clip_high")


def _finite(section: Any, prefix: str = "") -> None:
    """Refuse inf and nan anywhere below a section; most comparisons let one of them pass."""
    for f in fields(section):
        key, value = prefix + f.name, getattr(section, f.name)
        if is_dataclass(value):
            _finite(value, f"{key}.")
        elif isinstance(value, float):
            _require(math.isfinite(value) or key in INFINITY_MEANS_OFF, f"{key} must be a finite number, not {value}: try {key}=0.1")


def _unread(key: str, value: Any, advice: str) -> None:
    """Refuse a value that nothing would read; None and 0 mean "not set"."""
    _require(not value, f"{key}={value} is not read {advice}")


def _digits(section: str, source: Source | DemoSource, digits: list[int] | None) -> None:
    if source.name == "sign_countdown":
        _unread(f"{section}.digits", digits, f"by {section}=sign_countdown, whose numbers are 1 to 12: drop it")
        return
    _require(
        digits is not None and len(digits) == 2 and 1 <= digits[0] <= digits[1] <= 9,
        f"{section}.digits must be [fewest, most] with 1 <= fewest <= most <= 9, not {digits}: try '{section}.digits=[2,3]'",
    )


@dataclass
class Lora:
    rank: int
    """Rank r of the update B A added to every linear layer (Hu et al. 2021, arXiv:2106.09685)."""
    alpha: float
    """The update is scaled by alpha / rank."""
    init: str
    """peft's init_lora_weights: default or gaussian. Both start at exactly zero update."""
    path: Optional[str]
    """Folder of a LoRA adapter (PEFT format) to start from; a frozen copy of it is then the reference. The adapter brings its own
    rank, alpha and init; those above are not read then."""

    def __post_init__(self):
        _positive("model.lora", rank=self.rank, alpha=self.alpha)
        _at_most("model.lora", 65_536, rank=self.rank)
        _require(
            self.init in ("default", "gaussian"),
            f"model.lora.init={self.init} is not supported: the reference is the model with the adapter switched off, and only "
            "default and gaussian leave that exactly as it was (pissa and olora change it): "
            "try model.lora.init=default",
        )


@dataclass
class Model:
    path: str
    """Folder or hub id; `asset:NAME` is a model shipped with this package, `package:NAME` one inside a Python package."""
    gguf_file: Optional[str]
    """File name inside `path` when the weights are GGUF."""
    dtype: Dtype
    """auto: bfloat16 on cuda, float32 elsewhere. The adapter, log-softmax and loss are float32 in any case."""
    lora: Optional[Lora]
    """null trains all weights and keeps a frozen copy of the model as the reference."""
    micro_batch_tokens: int
    """Tokens (padding included) per training forward. Sets memory and speed, never the gradient."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, more time."""

    def __post_init__(self):
        _require(bool(self.path), "model.path is empty: try model.path=FOLDER or a hub id such as Qwen/Qwen2.5-0.5B-Instruct")
        _positive("model", micro_batch_tokens=self.micro_batch_tokens)


@dataclass
class Example:
    user: str
    assistant: str


@dataclass
class Prompt:
    template: str
    """The question as the model sees it; {question}, {answer} and the row's other fields are filled in."""
    chat: bool
    """Use the tokenizer's chat template; false feeds the template's text as it is."""
    system: Optional[str]
    examples: list[Example]
    """Worked examples shown before the question, as earlier turns of the chat."""

    def __post_init__(self):
        _require(
            self.chat or (not self.system and not self.examples),
            "data.prompt.system and data.prompt.examples need a chat: try data.prompt.chat=true, or put them into data.prompt.template",
        )


@dataclass
class TrainSplit:
    split: str
    """Split of a hub data set; unused for files and generators."""
    limit: Optional[int]
    """Keep the first N rows (of a generator: make N problems); null keeps all."""

    def __post_init__(self):
        _positive("data.train", limit=self.limit)


@dataclass
class EvalSplit:
    path: Optional[str]
    """File or hub id of the held-out rows; null: the split below of a hub data set when it is not the training split, else `holdout`."""
    split: str
    limit: Optional[int]
    holdout: float
    """Share of problems kept out of training, chosen by a hash of the question, when there is no held-out file or split."""

    def __post_init__(self):
        _positive("data.eval", limit=self.limit)
        _require(0 < self.holdout < 1, f"data.eval.holdout must lie between 0 and 1, not {self.holdout}: try data.eval.holdout=0.1")


@dataclass
class Data:
    source: Source
    """rows: a file or hub data set at data.path; the others are generators."""
    path: Optional[str]
    """.jsonl, .json or .parquet (each also .gz), or a hub id."""
    hub_config: Optional[str]
    """Configuration of the hub data set, such as `main` of openai/gsm8k."""
    train: TrainSplit
    eval: EvalSplit
    digits: Optional[list[int]]
    """Generators: fewest and most digits of a number."""
    layout: Layout
    """How a row says its question: plain in question_field; the others read the fields of the data set they are named after, and write
    `question`, `answer` and what reward rules read."""
    question_field: str
    answer_field: Optional[str]
    """null: rows without a gold answer, judged by their other fields."""
    answer_marker: Optional[str]
    """The gold answer is what follows the last such marker in the answer field; null takes the whole field."""
    numeric: bool
    """The gold answer must be a number; a row whose answer is not one is bad gold."""
    bad_gold: BadGold
    """refuse: stop and show bad golds; drop: leave those rows out, with a count."""
    max_prompt_tokens: int
    """Longer prompts are left out with a count, never cut."""
    difficulty: Optional[list[float]]
    """[low, high]: pass over problems whose pass rate lies outside; those not tried yet count as inside. When the band is empty the nearest
    to it are drawn; null draws all alike."""
    difficulty_map: Optional[str]
    """difficulty.json of an earlier run, whose pass rates this run starts from."""
    revisit: float
    """Share of draws that take a problem from outside the band: solved ones may be forgotten, hard ones come within reach."""
    prompt: Prompt

    def __post_init__(self):
        _require(
            self.source is not Source.rows or bool(self.path),
            "data.path is not set: try data.path=FILE.jsonl (or a hub id), or data=addition for the embedded task",
        )
        if self.source is not Source.rows:
            unread = {"path": self.path, "hub_config": self.hub_config, "eval.path": self.eval.path, "answer_marker": self.answer_marker}
            unread["layout"] = None if self.layout is Layout.plain else self.layout.name
            for key, value in unread.items():
                _unread(f"data.{key}", value, f"by data={self.source.name}: drop it, or try data=jsonl data.path=FILE.jsonl")
        _require(
            self.answer_field is not None or not (self.numeric or self.answer_marker),
            "data.answer_field=null leaves no gold answer to read: try data.numeric=false data.answer_marker=null",
        )
        _digits("data", self.source, self.digits)
        _positive("data", max_prompt_tokens=self.max_prompt_tokens)
        _require(0 <= self.revisit <= 1, f"data.revisit must lie in [0, 1], not {self.revisit}: try data.revisit=0.1")
        if self.difficulty is not None:
            _require(
                len(self.difficulty) == 2 and 0 <= self.difficulty[0] < self.difficulty[1] <= 1,
                f"data.difficulty must be [lowest, highest] pass rate in 0..1, not {self.difficulty}: try 'data.difficulty=[0.2,0.8]'",
            )


@dataclass
class Rule:
    fn: str
    """A rule of grpo_cli.rewards.rules by name, or your own as package.module:function."""
    weight: float = 1.0
    """The total reward is the weighted sum over the rules. May be negative; 0 measures without paying."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments handed to the function."""
    kind: RuleKind = RuleKind.outcome
    """outcome: one number per completion; process: a list of (end, number) pairs, one per step, end being a position in the text."""
    gate: Optional[str] = None
    """Another rule that must give 1 or above first: else this one is not called and gives 0."""
    on_error: float = 0.0
    """The score of a completion for which the rule raises, returns no score, or takes too long."""
    timeout_s: Optional[float] = None
    """Wall-clock limit of one call; null takes reward.timeout_s."""
    split: Optional[str] = None
    """For kind=process: a regular expression that stands between the steps of a completion. The rule, one for outcomes, then judges each
    step by itself (the classifier: all up to its end)."""


def _rule(name: str, value: Any) -> Rule:
    """One entry of reward.rules, checked by hand: a mapping of dataclasses could not take `+reward.rules.NAME.fn=...`."""
    here = f"reward.rules.{name}"
    keys = [f.name for f in fields(Rule)]
    set_it = f"{here}.fn is not set: try +{here}.fn=package.module:function"
    _require(isinstance(value, dict), set_it)
    for key in value:
        near = difflib.get_close_matches(str(key), keys, 1)
        _require(
            key in keys, f"{here}.{key} is unknown (there are: {', '.join(keys)})" + (f": did you mean {here}.{near[0]}?" if near else "")
        )
    _require(bool(value.get("fn")), set_it)
    rule = Rule(**value)
    for key in ("weight", "on_error", "timeout_s"):
        number = getattr(rule, key)
        ok = isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
        _require(ok or (key == "timeout_s" and number is None), f"{here}.{key} must be a finite number, not {number!r}: try {here}.{key}=1")
    _positive(here, timeout_s=rule.timeout_s)
    _require(isinstance(rule.args, dict), f"{here}.args must be a mapping, not {rule.args!r}: try '{here}.args={{}}'")
    kind = rule.kind if isinstance(rule.kind, RuleKind) else RuleKind.__members__.get(rule.kind)
    _require(kind is not None, f"{here}.kind is outcome or process, not {rule.kind!r}: try {here}.kind=outcome")
    if rule.split is not None:
        text = isinstance(rule.split, str) and rule.split != ""
        _require(text, f"{here}.split must be a regular expression, not {rule.split!r}: try '{here}.split=\"\\n+\"'")
        _require(kind is RuleKind.process, f"{here}.split makes steps, which only a process rule has: try {here}.kind=process")
        try:
            re.compile(rule.split)
        except re.error as error:
            raise ValueError(f"{here}.split={rule.split} is no regular expression: {error}") from error
    timeout_s = None if rule.timeout_s is None else float(rule.timeout_s)
    return Rule(str(rule.fn), float(rule.weight), rule.args, kind, rule.gate, float(rule.on_error), timeout_s, rule.split)


@dataclass
class Gate:
    mode: GateMode
    """Before training, tricks and right answers made from the run's own problems go through the rules. warn tells what was paid wrongly,
    refuse also ends the run."""
    problems: int
    """Training problems to make them from."""

    def __post_init__(self):
        _positive("reward.gate", problems=self.problems)


@dataclass
class Reward:
    rules: dict[str, Any]
    """Named rules; each becomes a `Rule`. Add one with +reward.rules.NAME.fn=package.module:function, drop one with ~reward.rules.NAME."""
    accuracy: str
    """Name of the rule that says whether a completion is right (score 1 or above): it defines accuracy and all-right groups."""
    timeout_s: float
    """Wall-clock limit of one call of a rule, whatever it does; then its process is killed and the call counts as an error."""
    memory_gib: float
    """Address space of each process that runs rules."""
    workers: Optional[int]
    """Processes that run rules; null is one per core, eight at most."""
    max_error_frac: float
    """The run stops when a rule fails on more than this share of the completions scored together."""
    gate: Gate
    control: Control
    """Train on a meaningless reward, to compare a gain with: random, format_only (without the accuracy rule), or shuffled_gold (each
    problem with another one's gold answer). Evaluations keep the real reward."""

    def __post_init__(self):
        _require(bool(self.rules), "reward.rules is empty: try reward=r1")
        self.rules = {name: _rule(name, value) for name, value in self.rules.items()}
        first, names = next(iter(self.rules)), ", ".join(self.rules)
        _require(
            self.accuracy in self.rules, f"reward.accuracy={self.accuracy} names no rule (there are: {names}): try reward.accuracy={first}"
        )
        _positive("reward", timeout_s=self.timeout_s, memory_gib=self.memory_gib, workers=self.workers)
        _require(self.workers is None or self.workers <= 256, f"reward.workers={self.workers} is more than 256: try reward.workers=8")
        _require(
            0 <= self.max_error_frac <= 1,
            f"reward.max_error_frac must lie in [0, 1], not {self.max_error_frac}: try reward.max_error_frac=0.1",
        )
        for name in self.rules:
            seen = [name]
            while (gate := self.rules[seen[-1]].gate) is not None:
                here = f"reward.rules.{seen[-1]}.gate={gate}"
                _require(gate in self.rules, f"{here} names no rule (there are: {names}): drop it")
                _require(gate not in seen, f"{here} closes a circle of gates ({' <- '.join(seen)}): drop it")
                seen.append(gate)
        _require(
            self.control is not Control.format_only or any(rule.weight for name, rule in self.rules.items() if name != self.accuracy),
            "reward.control=format_only needs a rule beside the accuracy rule: try reward=r1",
        )


@dataclass
class Algorithm:
    advantage: Advantage
    """How rewards become advantages; grpo_cli/advantages.py has one function and one equation for each."""
    std: Std
    """sample divides by the count less 1, population by the count."""
    combine: Combine
    """Several rules: weigh_first adds up weighted rewards and normalises the sum; normalise_first normalises each rule by itself."""
    ratio: Ratio
    """token: pi / pi_old of each token; sequence: their geometric mean over the completion (GSPO, arXiv:2507.18071)."""
    clip: Clip
    """ppo: min(w A, clip(w) A); cispo: a detached weight capped at 1 + clip_high (arXiv:2506.13585); none: w A."""
    clip_low: float
    clip_high: float
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: Optional[float]
    """ppo: where the advantage A is negative the loss is at most dual_clip x |A| (arXiv:1912.09729); null leaves it unbounded."""
    aggregation: Aggregation
    """sequence_mean: mean over completions of their token means; token_mean: over all tokens of the step; constant: divide by
    completions x rollout.max_new_tokens. One rule for the policy part and the KL part."""
    updates_per_rollout: int
    """mu: optimizer steps taken on each rollout."""
    truncated: Truncated
    """Completions cut at rollout.max_new_tokens: keep them in the loss, or mask them out of it (DAPO's overlong filtering)."""
    entropy_bonus: float
    """The loss is lowered by this times the policy's entropy (nats per token)."""
    resample_tries: int
    """Dynamic sampling (DAPO, arXiv:2503.14476): groups that are all right or all wrong are dropped and replaced, with at most so many
    further rollouts in a step; 0 trains on every group."""

    def __post_init__(self):
        _require(0 <= self.clip_low <= 1, f"algorithm.clip_low must lie in [0, 1], not {self.clip_low}: try algorithm.clip_low=0.2")
        _not_negative("algorithm", clip_high=self.clip_high, entropy_bonus=self.entropy_bonus, resample_tries=self.resample_tries)
        _positive("algorithm", updates_per_rollout=self.updates_per_rollout)
        _at_most("algorithm", 1000, resample_tries=self.resample_tries)
        _at_most("algorithm", 10_000, updates_per_rollout=self.updates_per_rollout)
        if self.dual_clip is not None:
            _require(
                math.isfinite(self.dual_clip),
                f"algorithm.dual_clip must be a finite number, not {self.dual_clip}: try algorithm.dual_clip=3, or null for no bound",
            )
            _require(
                self.clip is Clip.ppo,
                f"algorithm.dual_clip goes with algorithm.clip=ppo, not {self.clip.name}: try algorithm.dual_clip=null",
            )
            _require(
                self.clip_high < math.inf,
                f"algorithm.dual_clip={self.dual_clip:g} must be above 1 + algorithm.clip_high, which is inf: "
                "try algorithm.clip_high=0.2 or algorithm.dual_clip=null",
            )
            _require(
                self.dual_clip > 1 + self.clip_high,
                f"algorithm.dual_clip must be above 1 + algorithm.clip_high = {1 + self.clip_high:g}, not {self.dual_clip:g}: "
                f"try algorithm.dual_clip={max(3.0, 2 * (1 + self.clip_high)):g}",
            )
        _require(
            not (self.combine is Combine.normalise_first and self.advantage is Advantage.process),
            "algorithm.combine=normalise_first normalises rules apart, and algorithm.advantage=process pools them: "
            "try algorithm.combine=weigh_first",
        )
        _require(
            not (self.ratio is Ratio.sequence and self.advantage is Advantage.process),
            "algorithm.ratio=sequence gives all tokens of a completion one gradient, and algorithm.advantage=process tells them apart: "
            "try algorithm.ratio=token",
        )


@dataclass
class Kl:
    schedule: KlSchedule
    beta: float
    """Weight of the KL, or its start value when the schedule moves it."""
    warmup_steps: int
    """Steps over which beta rises from 0 to kl.beta before the schedule begins."""
    end_beta: Optional[float]
    """Linear and cosine: the value at the last step."""
    target: Optional[float]
    """Adaptive: the KL to the reference per completion (nats, k3: the metric kl/sequence) to hold."""
    gain: float
    """Adaptive: change of log beta per step at an error of 100 % (errors beyond are cut there)."""
    min_beta: float
    max_beta: float
    estimator: Estimator
    """Per token: k1, k2, k3 (GRPO's) or symmetric from the sampled token's log-probs; exact over the whole vocabulary."""
    anchor: Anchor
    """What the penalty holds the policy to: the reference, or the policy before this step's updates (in place of a clip)."""
    placement: Placement
    """loss: a term of the loss; reward: counts against a completion like a negative reward (and carries no gradient itself)."""
    gradient: KlGradient
    """Of the KL in the loss. plain: differentiate the estimator as it stands (DeepSeekMath); unbiased, for k1 and k3: weigh it by the
    ratio to the sampling policy, so that its gradient is that of the KL itself."""
    measure_every: int
    """With beta at 0 the KL is still measured, every so many steps."""
    sync_every: Optional[int]
    """Move the reference to the policy every so many steps; null leaves it at the start of the run."""
    sync_alpha: float
    """Reference sync: the new reference is alpha x policy + (1 - alpha) x reference, weight by weight (of the adapter, with LoRA)."""

    def __post_init__(self):
        _not_negative("kl", beta=self.beta, gain=self.gain, warmup_steps=self.warmup_steps)
        _positive("kl", measure_every=self.measure_every, target=self.target, sync_every=self.sync_every)
        for key, example in (("min_beta", 1e-4), ("max_beta", 10)):
            value = getattr(self, key)
            _require(value > 0, f"kl.{key} must be above 0, not {value}: try kl.{key}={example}")
        _require(
            self.min_beta < self.max_beta,
            f"kl.min_beta must be below kl.max_beta={self.max_beta:g}, not {self.min_beta:g}: "
            f"try kl.min_beta={min(1e-4, self.max_beta / 10):g}",
        )
        _require(0 < self.sync_alpha <= 1, f"kl.sync_alpha must lie in (0, 1], not {self.sync_alpha}: try kl.sync_alpha=1")
        if self.placement is Placement.reward:
            here = "kl.placement=reward"
            _require(
                self.estimator is Estimator.k1,
                f"{here} needs kl.estimator=k1, not {self.estimator.name}: only k1 in the reward has the gradient of the KL (the others' "
                "vanishes near the reference): try kl.estimator=k1",
            )
            _require(
                self.anchor is Anchor.reference,
                f"{here} is taken before any update, where the KL to the old policy is 0: try kl.anchor=reference",
            )
        _require(
            self.gradient is KlGradient.plain
            or (self.placement is Placement.loss and self.anchor is Anchor.reference and self.estimator in (Estimator.k1, Estimator.k3)),
            "kl.gradient=unbiased is for k1 or k3 to the reference in the loss: try kl.gradient=plain",
        )
        _require(
            not (self.anchor is Anchor.old and self.estimator is Estimator.exact),
            "kl.estimator=exact keeps the whole distribution of the reference only: try kl.estimator=k3 with kl.anchor=old",
        )
        moving = self.schedule in (KlSchedule.linear, KlSchedule.cosine)
        _require(
            not moving or self.end_beta is not None, f"kl.end_beta is not set, and kl={self.schedule.name} needs it: try kl.end_beta=0"
        )
        if moving:
            _not_negative("kl", end_beta=self.end_beta)
        else:
            _require(
                self.end_beta is None,
                f"kl.end_beta={self.end_beta} is not read by kl={self.schedule.name}: try kl=linear kl.end_beta={self.end_beta}",
            )
        if self.schedule is not KlSchedule.adaptive:
            _unread("kl.target", self.target, f"by kl={self.schedule.name}: try kl=adaptive kl.target={self.target}")
        else:
            _require(self.target is not None, "kl.target is not set, and kl=adaptive needs it: try kl.target=1")
            _require(self.gain > 0, f"kl.gain must be above 0 with kl=adaptive, not {self.gain:g}: try kl.gain=0.1, or kl=constant")
            within = min(max(0.04, self.min_beta), self.max_beta)
            _require(
                self.min_beta <= self.beta <= self.max_beta,
                f"kl=adaptive starts from kl.min_beta={self.min_beta:g} <= kl.beta <= kl.max_beta={self.max_beta:g}, not {self.beta:g}: "
                f"it moves log beta, so 0 is out of reach: try kl.beta={within:g}",
            )
        if self.schedule is KlSchedule.none:
            _require(
                self.beta == 0, f"kl=none has no penalty, so kl.beta={self.beta} would do nothing: try kl=constant kl.beta={self.beta}"
            )
            _unread("kl.warmup_steps", self.warmup_steps, "by kl=none: drop it, or try kl=constant")


@dataclass
class GroupSize:
    samples_per_prompt: int
    """G: completions drawn per prompt; advantages are relative to these."""
    completions_per_step: int
    """P * G: the budget of one step. A sweep over G leaves it alone, so arms compare like with like."""

    def __post_init__(self):
        G, budget = self.samples_per_prompt, self.completions_per_step
        _at_most("group_size", 10_000_000, samples_per_prompt=G, completions_per_step=budget)
        _require(
            G >= 2,
            f"group_size.samples_per_prompt must be 2 or above, not {G}: a group of one has no advantage: "
            "try group_size=g8 or group_size.samples_per_prompt=2",
        )
        if budget < G or budget % G:
            near = sorted({max(G, budget // G * G), (budget // G + 1) * G})
            raise ValueError(
                f"group_size.completions_per_step={budget} is not a multiple of group_size.samples_per_prompt={G}: "
                f"try group_size.completions_per_step={' or '.join(map(str, near))}"
            )

    @property
    def prompts_per_step(self) -> int:
        return self.completions_per_step // self.samples_per_prompt


@dataclass
class Optimizer:
    name: OptimizerName
    lr: float
    betas: list[float]
    """Adam: decay rates of the first and second moment."""
    momentum: float
    """SGD only; 0 elsewhere."""
    weight_decay: float
    grad_clip: float
    """Largest L2 norm of the gradient; 0 switches clipping off."""
    schedule: LrSchedule
    warmup_steps: int
    """Optimizer steps over which lr rises linearly from 0."""
    final_lr_frac: float
    """Linear and cosine end at this share of lr."""

    def __post_init__(self):
        _positive("optimizer", lr=self.lr)
        _not_negative(
            "optimizer", momentum=self.momentum, weight_decay=self.weight_decay, grad_clip=self.grad_clip, warmup_steps=self.warmup_steps
        )
        if self.name is not OptimizerName.sgd:
            _unread("optimizer.momentum", self.momentum, f"by optimizer={self.name.name}: try optimizer=sgd, or optimizer.betas=[0.9,0.95]")
        _require(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas),
            f"optimizer.betas must be two numbers in [0, 1), not {self.betas}: try 'optimizer.betas=[0.9,0.95]'",
        )
        _require(
            0 <= self.final_lr_frac <= 1,
            f"optimizer.final_lr_frac must lie in [0, 1], not {self.final_lr_frac}: try optimizer.final_lr_frac=0.1",
        )


@dataclass
class Rollout:
    engine: Engine
    """What computes rollout, reference and update: the native fast path, for the models it knows, or the plain transformers forward."""
    temperature: float
    """Logits are divided by it when sampling and in every training forward alike."""
    top_k: int
    """Only the so many most likely tokens are drawn, 0 for all; the log-probs of every forward are those of the cut distribution."""
    top_p: float
    """Only the fewest most likely tokens that hold this much of the probability are drawn, 1 for all; log-probs as with top_k."""
    max_new_tokens: int
    rows_at_once: int
    """Most completions decoded side by side; bounds the memory of the KV cache."""

    def __post_init__(self):
        _require(self.temperature > 0, f"rollout.temperature must be above 0, not {self.temperature}: try rollout.temperature=1")
        _require(self.top_k >= 0, f"rollout.top_k must be 0 (all tokens) or more, not {self.top_k}: try rollout.top_k=0")
        _require(0 < self.top_p <= 1, f"rollout.top_p must be above 0 and at most 1 (all tokens), not {self.top_p}: try rollout.top_p=1")
        _positive("rollout", max_new_tokens=self.max_new_tokens, rows_at_once=self.rows_at_once)
        _at_most("rollout", 1_000_000, max_new_tokens=self.max_new_tokens)


@dataclass
class Evaluation:
    samples_per_problem: int
    """Completions sampled per held-out problem, at rollout.temperature."""
    pass_at: list[int]
    """Values of k for eval/pass@k (unbiased estimator of Chen et al. 2021, arXiv:2107.03374)."""

    def __post_init__(self):
        _positive("evaluation", samples_per_problem=self.samples_per_problem)
        _at_most("evaluation", 1_000_000, samples_per_problem=self.samples_per_problem)
        for k in self.pass_at:
            _require(k >= 1, f"evaluation.pass_at has k={k}, and k counts samples, at least 1: try 'evaluation.pass_at=[1]'")
            _require(
                k <= self.samples_per_problem,
                f"evaluation.pass_at has k={k}, more than evaluation.samples_per_problem={self.samples_per_problem}: "
                f"try evaluation.samples_per_problem={k}",
            )


@dataclass
class Stop:
    metric: str
    """An eval/ metric; higher is better. It also chooses the best checkpoint."""
    threshold: Optional[float]
    """Stop once the metric reaches this."""
    patience: Optional[int]
    """Stop after this many evaluations in a row without a new best."""

    def __post_init__(self):
        _require(
            self.metric.startswith("eval/"),
            f"stop.metric={self.metric} is not an evaluation metric: try stop.metric=eval/accuracy",
        )
        _positive("stop", patience=self.patience)


@dataclass
class TrackerSection:
    name: TrackerName
    mode: WandbMode
    """auto: online when credentials are found, else offline."""
    project: str
    entity: Optional[str]
    group: Optional[str]
    """wandb group; null takes the sweep's folder name in a sweep."""
    run_name: Optional[str]
    """null takes the run folder's name, in a sweep the job's overrides."""
    tags: list[str]


@dataclass
class GrpoRun:
    model: Model
    data: Data
    reward: Reward
    algorithm: Algorithm
    kl: Kl
    group_size: GroupSize
    optimizer: Optimizer
    rollout: Rollout
    evaluation: Evaluation
    stop: Stop
    tracker: TrackerSection
    steps: int
    """Rollouts, each followed by algorithm.updates_per_rollout optimizer steps; one row of metrics each."""
    seed: int
    threads: int
    """CPU threads. Sums depend on it, so it is config; tiny models are fastest on one."""
    device: str
    """auto, cpu, cuda, cuda:1 or mps."""
    eval_every: int
    save_every: int
    keep_checkpoints: int
    """The newest K are kept, and the best by stop.metric."""
    sample_every: int
    """Every so many steps a few completions go to samples.jsonl."""
    log_every: int
    """Steps per printed line when the output is not a terminal."""
    resume: Optional[str]
    """null starts afresh; auto continues hydra.run.dir or the newest unfinished run of this config; a folder continues that run."""
    debug: bool
    """Show the traceback of an error."""

    def __post_init__(self):
        _finite(self)
        _positive(
            "",
            steps=self.steps,
            threads=self.threads,
            eval_every=self.eval_every,
            save_every=self.save_every,
            keep_checkpoints=self.keep_checkpoints,
            sample_every=self.sample_every,
            log_every=self.log_every,
        )
        _at_most("", MOST_STEPS, steps=self.steps)
        _check_machine(self.seed, self.threads, self.device)
        _require(
            self.resume not in ("", "True", "False"),  # as omegaconf writes what was no text
            f"resume={self.resume} is neither auto nor a run folder: try resume=auto",
        )
        kl = self.kl
        _require(
            kl.warmup_steps < self.steps,
            f"kl.warmup_steps={kl.warmup_steps} leaves no step after it: try kl.warmup_steps={self.steps // 10}",
        )
        cut = "rollout.top_k" if self.rollout.top_k else "rollout.top_p" if self.rollout.top_p < 1 else None
        _require(
            cut is None or kl.estimator is not Estimator.exact,
            f"kl.estimator=exact compares whole distributions, and {cut} cuts each at another place: try kl.estimator=k3",
        )
        apart = self.algorithm.combine is Combine.normalise_first
        _require(
            self.reward.control is not Control.random or not apart,
            "reward.control=random draws one reward per completion, and algorithm.combine=normalise_first needs one per rule: "
            "try algorithm.combine=weigh_first",
        )
        _require(
            self.data.source is not Source.sign_countdown or self.reward.rules[self.reward.accuracy].fn != "numeric",
            "data=sign_countdown asks for signs, and the numeric rule would pay for the target itself: "
            "try model=tiny_countdown reward=sign_countdown",
        )
        known = ["eval/accuracy", "eval/accuracy_greedy", "eval/reward", *(f"eval/pass@{k}" for k in self.evaluation.pass_at)]
        _require(
            self.stop.metric in known,
            f"stop.metric={self.stop.metric} is not measured by this run (there are: {', '.join(known)}): try stop.metric=eval/accuracy",
        )


def _check_device(device: str) -> None:
    known = re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", device, re.ASCII)
    _require(bool(known), f"device={device} is unknown: try device=auto, cpu, cuda, cuda:1 or mps")


def _check_machine(seed: int, threads: int, device: str) -> None:
    _require(0 <= seed < 2**63, f"seed must be 0 or above, not {seed}: try seed=0")
    _check_device(device)
    cores = os.cpu_count() or 1
    _require(threads <= 4 * cores, f"threads={threads} is more than 4 for each of this machine's {cores} cores: try threads={cores}")


@dataclass
class ScoreRun:
    reward: Reward
    completions: Optional[str]
    """.jsonl, .json or .parquet (each also .gz): rows with completion, answer or gold, and whatever the rules read, such as tests."""
    save: Optional[str]
    """Where the scores go, one JSON object per row in the same order; null only shows them."""
    device: str
    """Where a rule that is a model runs: auto, cpu, cuda, cuda:1 or mps."""
    show: int
    """Rows shown of the slowest and of those that raised."""
    debug: bool
    """Show the traceback of an error."""

    def __post_init__(self):
        _finite(self)
        _require(bool(self.completions), "completions is not set: try completions=FILE.jsonl")
        _require(self.save != "", "save is empty: try save=SCORES.jsonl")
        _not_negative("", show=self.show)
        _check_device(self.device)


@dataclass
class Demos:
    source: DemoSource
    """sloppy_addition, sign_countdown: the generators behind the embedded models; rows: a file of {prompt, completion}."""
    path: Optional[str]
    """.jsonl, .json or .parquet (each also .gz) with a prompt and a completion field."""
    prompt_field: str
    completion_field: str
    chat: bool
    """Put the prompt through the tokenizer's chat template as a user turn."""
    digits: Optional[list[int]]
    """Generator: fewest and most digits of a number."""
    holdout: float
    """Generator: share of questions that never occur, by the hash of data.eval.holdout; keep the two equal."""
    guess_frac: float
    """Share of demonstrations that guess without working; sign_countdown: share of misses that are answered instead of tried again."""
    slip_frac: float
    """Chance of a wrong digit, and of a wrong carry, per column; sign_countdown: chance of trying on behind a hit."""
    broken_tag_frac: float
    """Share of demonstrations with a tag missing or out of place."""

    def __post_init__(self):
        _require(
            self.source is not DemoSource.rows or bool(self.path),
            "demos.path is not set: try demos.path=FILE.jsonl with the fields prompt and completion",
        )
        if self.source is not DemoSource.rows:
            _unread("demos.path", self.path, f"by demos={self.source.name}: drop it, or try demos=jsonl demos.path={self.path}")
        _digits("demos", self.source, self.digits)
        _require(0 < self.holdout < 1, f"demos.holdout must lie between 0 and 1, not {self.holdout}: try demos.holdout=0.1")
        for key in ("guess_frac", "slip_frac", "broken_tag_frac"):
            value = getattr(self, key)
            _require(0 <= value <= 1, f"demos.{key} must lie in [0, 1], not {value}: try demos.{key}=0.1")


@dataclass
class SftRun:
    model: Model
    demos: Demos
    optimizer: Optimizer
    steps: int
    batch_size: int
    """Demonstrations per optimizer step."""
    seed: int
    threads: int
    device: str
    log_every: int
    debug: bool

    def __post_init__(self):
        _finite(self)
        _positive("", steps=self.steps, batch_size=self.batch_size, threads=self.threads, log_every=self.log_every)
        _at_most("", MOST_STEPS, steps=self.steps)
        _check_machine(self.seed, self.threads, self.device)
