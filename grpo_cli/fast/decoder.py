"""A small decoder for the Llama family that reads the weights of a transformers model and the LoRA that peft put into it.

It computes what transformers computes, but reads the prompt of a group once, pads nothing and fuses the frozen projections.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_cli.fast.ops import GATE, SAME, Adapter, Heads, Norm, Prepare, merged, project, shared_attention
from grpo_cli.fast.packing import pack
from grpo_cli.records import Batch

KNOWN = ("llama", "mistral", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3", "yarn")
PACK_ABOVE = 2**24
"""The weights of larger models are laid out for oneDNN while decoding, which reads them faster from memory; those of smaller ones, which
stay in the cache, are transposed."""

Linear = Callable[[Tensor, Prepare], Tensor]
Attend = Callable[[int, Tensor], Tensor]


def unknown(lm) -> str | None:
    """Why this model has to run on the plain transformers forward; None when the decoder knows it."""
    config = lm.config
    if config.model_type not in KNOWN:
        return f"{config.model_type} is none of {', '.join(KNOWN)}"
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return "not all of its layers have full attention"
    if config.model_type == "mistral" and config.sliding_window is not None:
        return f"it has a sliding window of {config.sliding_window} tokens"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if lm.model.rotary_emb.rope_type not in ROPES:
        return f"its rotary positions are of the kind {lm.model.rotary_emb.rope_type}"
    return None


class Linears:
    """Linear layers that read the same input, as one. Frozen ones become views of one tensor, so nothing is held twice."""

    def __init__(self, *modules):
        self._modules = modules
        self._bases = [getattr(module, "base_layer", module) for module in modules]
        self._sizes = [len(base.weight) for base in self._bases]
        self._trained = any(base.weight.requires_grad for base in self._bases)
        self._parts: list[Tensor] = []

    def _joined(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of all together, as they are now."""
        weights, bias = [base.weight for base in self._bases], None
        if any(base.bias is not None for base in self._bases):
            bias = torch.cat([base.weight.new_zeros(len(base.weight)) if base.bias is None else base.bias for base in self._bases])
        if self._trained:
            return torch.cat(weights), bias
        if [weight.data_ptr() for weight in weights] != [part.data_ptr() for part in self._parts]:
            self._whole = torch.cat([weight.data for weight in weights]) if len(weights) > 1 else weights[0].data
            self._parts = list(self._whole.split(self._sizes))
            for weight, part in zip(weights, self._parts, strict=True):
                weight.data = part
        return self._whole, bias

    def _adapters(self) -> list[Adapter]:
        """Those that are switched on."""
        found, start = [], 0
        for module, size in zip(self._modules, self._sizes, strict=True):
            if hasattr(module, "lora_A") and not module.disable_adapters:
                (name,) = module.active_adapters
                matrices = module.lora_A[name].weight, module.lora_B[name].weight
                found.append(Adapter(*matrices, module.scaling[name], slice(start, start + size)))
            start += size
        return found

    def __call__(self, x: Tensor, prepare: Prepare) -> Tensor:
        if not self._trained:
            return project(x, prepare, *self._joined(), self._adapters())
        prepared = prepare(x)
        parts = [F.linear(prepared, base.weight, base.bias) for base in self._bases]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def for_decoding(self, packed: bool) -> Linear:
        """The same without gradient, in the fastest form for few rows. Adapters are merged into a copy, but for bfloat16: a merge would
        round small updates away, so there they stay apart."""
        (weight, bias), adapters = self._joined(), self._adapters()
        if adapters and weight.dtype is torch.bfloat16:
            return self.__call__
        spans = tuple((adapter.scaling, adapter.out) for adapter in adapters)
        weight = merged(weight, spans, tuple(matrix for adapter in adapters for matrix in adapter[:2]))
        product = _quick(weight, packed)

        def linear(x: Tensor, prepare: Prepare) -> Tensor:
            y = product(prepare(x))
            return y if bias is None else y + bias

        return linear


def _quick(weight: Tensor, packed: bool) -> Callable[[Tensor], Tensor]:
    """x -> x W^T for products of few rows."""
    if weight.device.type != "cpu" or weight.dtype is not torch.float32:
        return partial(F.linear, weight=weight)
    if not packed:
        transposed = weight.T.contiguous()
        return lambda x: x @ transposed
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, laid_out, None, "none", [], "")


class Decoder:
    """The blocks of one model. `lm` is the transformers model, adapter layers inside; its weights may move and be swapped at will."""

    def __init__(self, lm):
        self._lm, config = lm, lm.config
        self.head = lm.get_output_embeddings()
        first = lm.model.layers[0].self_attn
        self.heads = Heads(config.num_attention_heads, config.num_key_value_heads, first.scaling)
        self.head_dim = first.head_dim
        self.layers = len(lm.model.layers)
        self._packed = sum(p.numel() for p in lm.parameters()) > PACK_ABOVE and torch.backends.mkldnn.is_available()
        self._checkpointed = lm.model.gradient_checkpointing
        self._linears = []
        for layer in lm.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = Linears(attention.q_proj, attention.k_proj, attention.v_proj)
            gate_up = Linears(mlp.gate_proj, mlp.up_proj)
            self._linears.append((qkv, Linears(attention.o_proj), gate_up, Linears(mlp.down_proj)))

    def for_decoding(self) -> tuple[list[tuple[Linear, ...]], Callable[[Tensor], Tensor]]:
        """The linear layers of each block, and the head's product."""
        linears = [tuple(linear.for_decoding(self._packed) for linear in linears) for linears in self._linears]
        return linears, _quick(self.head.weight, self._packed)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._lm.model.embed_tokens.weight)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 1, D) cosines and sines, those of the first half with a minus, as `rotate` wants them."""
        cos, sin = self._lm.model.rotary_emb(self._lm.model.embed_tokens.weight, positions[None])
        sin[..., : self.head_dim // 2].neg_()
        return cos[0, :, None], sin[0, :, None]

    def final_norm(self, x: Tensor) -> Tensor:
        return _norm(self._lm.model.norm)(x)

    def run(self, x: Tensor, attend: Attend, linears: list[tuple[Linear, ...]], kept: Tensor | None = None) -> Tensor:
        """The residual stream behind all blocks, (N, H); of the rows `kept` alone, if given: the last block is for these only.

        attend(layer, heads) gets the rows' heads (N, queries + 2 keys, D), positions not applied, and returns (N, queries x D).
        """
        for number, (layer, block) in enumerate(zip(self._lm.model.layers, linears, strict=True)):
            rows = kept if number == self.layers - 1 else None
            arguments = (x, layer, block, partial(attend, number), rows)
            if self._checkpointed and torch.is_grad_enabled():
                x = checkpoint(self._block, *arguments, use_reentrant=False)
            else:
                x = self._block(*arguments)
        return x

    def _block(self, x: Tensor, layer, linears: tuple[Linear, ...], attend: Callable[[Tensor], Tensor], kept: Tensor | None) -> Tensor:
        qkv, out, gate_up, down = linears
        heads_NKD = qkv(x, _norm(layer.input_layernorm)).unflatten(1, (-1, self.head_dim))
        if hasattr(layer.self_attn, "q_norm"):
            q, k, v = heads_NKD.split([self.heads.queries, self.heads.keys, self.heads.keys], dim=1)
            heads_NKD = torch.cat([_norm(layer.self_attn.q_norm)(q), _norm(layer.self_attn.k_norm)(k), v], dim=1)
        attended = attend(heads_NKD)
        if kept is not None:
            x, attended = x[kept], attended[kept]
        x = x + out(attended, SAME)
        return x + down(gate_up(x, _norm(layer.post_attention_layernorm)), GATE)

    def features(self, batch: Batch) -> Tensor:
        """(N, H) last hidden states before each completion token, row by row of the batch and without padding."""
        packed = pack(batch)
        cos, sin = self.rotary(packed.positions)

        def attend(number: int, heads_NKD: Tensor) -> Tensor:
            return shared_attention(heads_NKD, cos, sin, self.heads, packed.layout)

        x = self.run(self.embed(packed.ids), attend, self._linears, packed.kept)
        return self.final_norm(x[packed.predicts])


def _norm(module) -> Norm:
    return Norm(module.weight, module.variance_epsilon)
