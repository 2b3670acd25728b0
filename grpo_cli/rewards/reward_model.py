"""The rule that is a model: it judges in the main process, many completions at a time, on the run's device."""

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from grpo_cli.config import Rule, RuleKind
from grpo_cli.records import END, Sample
from grpo_cli.rewards.calling import Failed, Verdict, is_score, split_steps


class Classifier:
    """A sequence-classification model that reads prompt and completion.

    With one output its value is the score; with several, the probability of `label`. Under kind=process with a split every step is
    scored by the text up to its end.
    """

    def __init__(
        self,
        rule: Rule,
        device: torch.device,
        *,
        path: str,
        label: int | str | None = None,
        batch_size: int = 16,
        max_tokens: int = 2048,
    ):
        """path: a folder or hub id. Texts longer than max_tokens lose their beginning. ValueError when the model does not fit."""
        self._rule, self._device, self._batch_size, self._max_tokens = rule, device, batch_size, max_tokens
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")
            model, report = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"args.path={path} holds no sequence-classification model: {str(error).splitlines()[0]}") from error
        if report["missing_keys"]:
            raise ValueError(f"args.path={path} lacks weights of a classifier ({', '.join(sorted(report['missing_keys'])[:3])})")
        self._model = model.eval().requires_grad_(False).to(device)
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._label = self._number(label)

    def judge(self, samples: list[Sample]) -> list[Verdict]:
        split = self._rule.split
        ends = [[end for _, end in split_steps(s.text, split)] if split else [len(s.text)] for s in samples]
        texts = [self._text(sample, sample.text[:end]) for sample, own in zip(samples, ends, strict=True) for end in own]
        scores = iter(self._scores(texts))
        verdicts: list[Verdict] = []
        for own in ends:
            steps = [(end if self._rule.kind is RuleKind.process else END, next(scores)) for end in own]
            wrong = next((score for _, score in steps if not is_score(score)), None)
            verdicts.append(steps if wrong is None else Failed(f"gave {wrong}"))
        return verdicts

    def _text(self, sample: Sample, completion: str) -> str:
        if self._tokenizer.chat_template is None or isinstance(sample.problem.prompt, str):
            return sample.prompt_text + completion
        messages = [*sample.problem.prompt, {"role": "assistant", "content": completion}]
        return self._tokenizer.apply_chat_template(messages, tokenize=False)

    @torch.no_grad()
    def _scores(self, texts: list[str]) -> list[float]:
        scores = []
        for start in range(0, len(texts), self._batch_size):
            batch = texts[start : start + self._batch_size]
            encoded = self._tokenizer(batch, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt")
            logits_BC = self._model(**encoded.to(self._device)).logits.float()
            values_B = logits_BC[:, 0] if self._label is None else logits_BC.softmax(dim=1)[:, self._label]
            scores += values_B.tolist()
        return scores

    def _number(self, label: int | str | None) -> int | None:
        names = {number: str(name) for number, name in self._model.config.id2label.items()}
        if len(names) == 1 and label is None:
            return None
        for number, name in names.items():
            if label in (number, name):
                return number
        raise ValueError(f"args.label={label} names none of its classes ({', '.join(f'{n}: {name}' for n, name in names.items())})")
