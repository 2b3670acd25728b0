"""The differentiable pieces of the fast forward: fused projections with LoRA, shared-prompt attention, a head that scores tokens.

Each saves its input and little else; frozen weights get no gradient. Shapes: N tokens packed without padding, H hidden, D of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

# --- what is done to the input of a projection

Backward = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Norm:
    """RMSNorm: weight x / rms(x), in float32 as transformers has it."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        normed = (x.float() * self._rrms(x)).to(x.dtype)
        return normed * self.weight if torch.is_grad_enabled() else normed.mul_(self.weight)

    def _rrms(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        return (norm.square() / x.shape[-1] + self.eps).rsqrt()

    def backward(self, x: Tensor, a: Tensor | None, into_low: Tensor | None, grad: Tensor | None) -> Backward:
        rrms, low, into_a, into_x = self._rrms(x), None, None, None
        if a is not None:  # without making the normalised input again
            wide = x.to(a.dtype)
            low = (wide @ (a * self.weight).T).mul_(rrms)
            into_a = ((into_low * rrms).T @ wide).mul_(self.weight)
        if grad is not None:
            scaled, wide = (grad * self.weight).to(rrms.dtype), x.to(rrms.dtype)
            along = (scaled * wide).sum(-1, keepdim=True).mul_(rrms**3 / x.shape[-1])
            into_x = scaled.mul_(rrms).addcmul_(wide, along, value=-1).to(x.dtype)
        return low, into_a, into_x


class Gate:
    """SwiGLU of (gate, up) side by side: silu(gate) up."""

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up if torch.is_grad_enabled() else F.silu(gate).mul_(up)

    def backward(self, x: Tensor, a: Tensor | None, into_low: Tensor | None, grad: Tensor | None) -> Backward:
        gate, up = x.chunk(2, dim=-1)
        opened, low, into_a, into_x = F.silu(gate), None, None, None
        if grad is not None:
            into_x = torch.empty_like(x)
            into_gate, into_up = into_x.chunk(2, dim=-1)
            torch.mul(grad, opened, out=into_up)
            torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=into_gate)
        if a is not None:
            low, into_a, _ = SAME.backward(opened.mul_(up), a, into_low, None)
        return low, into_a, into_x


class Same:
    def __call__(self, x: Tensor) -> Tensor:
        return x

    def backward(self, x: Tensor, a: Tensor | None, into_low: Tensor | None, grad: Tensor | None) -> Backward:
        if a is None:
            return None, None, grad
        wide = x.to(a.dtype)
        return wide @ a.T, into_low.T @ wide, grad


SAME, GATE = Same(), Gate()
Prepare = Norm | Gate | Same
"""Called with x it prepares the input of a projection. backward(x, a, into_low, grad) gives, for LoRA's stacked matrices a (R, in),
prepared(x) a^T and the gradient of a, into_low (N, R) being the one of the former; and the gradient in x for one in prepared(x), `grad`,
which it may use up."""

# --- projections


class Adapter(NamedTuple):
    """LoRA of one part of a fused projection: scaling x A^T B^T added to the outputs `out`."""

    a: Tensor
    b: Tensor
    scaling: float
    out: slice


class _Project(Function):
    @staticmethod
    def forward(ctx, x, prepare: Prepare, weight, bias, spans, *matrices):
        ctx.prepare, ctx.spans, prepared = prepare, spans, prepare(x)
        ctx.save_for_backward(x, weight, *matrices)
        if weight.dtype is not torch.bfloat16:
            return F.linear(prepared, merged(weight, spans, matrices), bias)
        # In bfloat16 a merge would round small updates away.
        y = F.linear(prepared, weight, bias)
        for (scaling, out), a, b in zip(spans, matrices[::2], matrices[1::2], strict=True):
            y[:, out].add_((prepared.to(a.dtype) @ a.T) @ b.T, alpha=scaling)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, weight, *matrices = ctx.saved_tensors
        spans, sides, a, into_low, into = ctx.spans, matrices[1::2], None, None, None
        if spans:
            a = torch.cat(matrices[::2])
            into_low = torch.cat(
                [(grad[:, out].to(b.dtype) @ b).mul_(scaling) for (scaling, out), b in zip(spans, sides, strict=True)], dim=1
            )
        if ctx.needs_input_grad[0]:
            if weight.dtype is not torch.bfloat16:
                into = grad @ merged(weight, spans, matrices)
            else:
                into = grad @ weight
                into = into.add_(into_low @ a) if spans else into
        low, into_a, into_x = ctx.prepare.backward(x, a, into_low, into)
        grads = []
        if spans:
            ranks = [b.shape[1] for b in sides]
            for (scaling, out), part, b_low in zip(spans, into_a.split(ranks), low.split(ranks, dim=1), strict=True):
                grads += [part, (grad[:, out].to(b_low.dtype).T @ b_low).mul_(scaling)]
        return into_x, None, None, None, None, *grads


def merged(weight: Tensor, spans: tuple[tuple[float, slice], ...], matrices: tuple[Tensor, ...]) -> Tensor:
    """The weight with all its adapters added, a copy if there are any."""
    if spans:
        weight = weight.clone()
        for (scaling, out), a, b in zip(spans, matrices[::2], matrices[1::2], strict=True):
            weight[out].addmm_(b, a, alpha=scaling)
    return weight


def project(x: Tensor, prepare: Prepare, weight: Tensor, bias: Tensor | None, adapters: list[Adapter]) -> Tensor:
    """prepare(x) W^T + b plus what the adapters add; gradients go to x and to the adapters alone."""
    spans = tuple((adapter.scaling, adapter.out) for adapter in adapters)
    return _Project.apply(x, prepare, weight, bias, spans, *(matrix for adapter in adapters for matrix in adapter[:2]))


# --- attention


class Heads(NamedTuple):
    """How a fused projection (N, (queries + 2 keys) D) falls into heads: queries, then keys, then values."""

    queries: int
    keys: int
    scale: float


def rotate(heads_NKD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, first: int) -> Tensor:
    """The `first` heads turned by the rotary position, (a, b) -> (a cos - b sin, b cos + a sin) for halves a, b; the others copied.

    sin holds -sin in its first half, so that the gradient is turned back by -sin.
    """
    turned, half = torch.empty_like(heads_NKD), heads_NKD.shape[-1] // 2
    still = heads_NKD[:, :first]
    torch.mul(still, cos_N1D, out=turned[:, :first])
    turned[:, :first].addcmul_(torch.cat([still[..., half:], still[..., :half]], dim=-1), sin_N1D)
    turned[:, first:] = heads_NKD[:, first:]
    return turned


class _Rotate(Function):
    @staticmethod
    def forward(ctx, heads, cos, sin, first):
        ctx.save_for_backward(cos, sin)
        ctx.first = first
        return rotate(heads, cos, sin, first)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, -sin, ctx.first), None, None, None


@dataclass(frozen=True)
class Layout:
    """Where the tokens of some groups lie in one packed sequence: all prompts first, then the completions, prompt by prompt."""

    prompts: list[slice]
    shared: list[tuple[slice, slice]]
    """Each prompt with the tokens of all its completions, where there are any."""
    begin: int
    """Where the completions begin."""
    own_NT: Tensor
    """Place among the completion tokens of the t-th token of each completion; behind its end the place of its first token."""
    valid_NT: Tensor
    prompt_of_N: Tensor
    """Number of the prompt of each completion."""
    even: bool
    """All completions are of one length, so that own_NT is an arange."""


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _split(heads: Heads, tensor_NKD: Tensor) -> tuple[Tensor, ...]:
    return tensor_NKD.split([heads.queries, heads.keys, heads.keys], dim=1)


def _one(tensor_NKD: Tensor, where: slice) -> Tensor:
    """(1, heads, tokens, D) view of some tokens."""
    return tensor_NKD[where].transpose(0, 1)[None]


class _SharedAttention(Function):
    """Completions attend to their shared prompt and to themselves; the two parts are merged by their log-sum-exp.

    The backward of flash attention needs only the output and the log-sum-exp, and those of the whole give the exact gradient of each
    part (arXiv:2205.14135, B.2), so no key is ever copied per sample and no mask exists.
    """

    @staticmethod
    def forward(ctx, heads_NKD, cos, sin, heads: Heads, layout: Layout):
        turned = rotate(heads_NKD, cos, sin, heads.queries + heads.keys)
        q, k, v = _split(heads, turned)
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32 if q.dtype is not torch.float64 else q.dtype)
        for prompt in layout.prompts:
            part, part_lse = _flash(_one(q, prompt), _one(k, prompt), _one(v, prompt), 0.0, True, scale=heads.scale)
            out[prompt], lse[prompt] = part[0].transpose(0, 1), part_lse[0].T
        if layout.shared:
            begin = layout.begin
            own, own_lse = _flash(*(_padded(x[begin:], layout) for x in (q, k, v)), 0.0, True, scale=heads.scale)
            own, own_lse = _packed(own, layout), _packed(own_lse[..., None], layout)[..., 0]
            for prompt, completions in layout.shared:
                part, part_lse = _flash(_one(q, completions), _one(k, prompt), _one(v, prompt), 0.0, False, scale=heads.scale)
                out[completions], lse[completions] = part[0].transpose(0, 1), part_lse[0].T
            shared_lse = lse[begin:]
            total = torch.logaddexp(shared_lse, own_lse)
            out[begin:].mul_((shared_lse - total).exp_()[..., None]).addcmul_(own, (own_lse - total).exp_()[..., None].to(own.dtype))
            lse[begin:] = total
        ctx.heads, ctx.layout = heads, layout
        ctx.save_for_backward(turned, out, lse, cos, sin)
        return out.flatten(1)

    @staticmethod
    def backward(ctx, grad):
        turned, out, lse, cos, sin = ctx.saved_tensors
        heads, layout = ctx.heads, ctx.layout
        q, k, v = _split(heads, turned)
        grad = grad.view_as(out)
        into = torch.zeros_like(turned)
        into_q, into_k, into_v = _split(heads, into)

        def add(queries: slice, keys: slice, causal: bool) -> None:
            parts = (_one(grad, queries), _one(q, queries), _one(k, keys), _one(v, keys), _one(out, queries))
            found = _flash_backward(*parts, lse[queries].T[None], 0.0, causal, scale=heads.scale)
            for target, where, part in zip((into_q, into_k, into_v), (queries, keys, keys), found, strict=True):
                target[where] += part[0].transpose(0, 1)

        for prompt in layout.prompts:
            add(prompt, prompt, True)
        for prompt, completions in layout.shared:
            add(completions, prompt, False)
        if layout.shared:
            begin = layout.begin
            parts = [_padded(x[begin:], layout) for x in (grad, q, k, v, out)]
            padded_lse = _padded(lse[begin:, :, None], layout)[..., 0]
            if not layout.even:
                # A row of padding must weigh nothing: exp(score - infinity) = 0.
                padded_lse = padded_lse.masked_fill(~layout.valid_NT[:, None], torch.inf)
            found = _flash_backward(*parts, padded_lse, 0.0, True, scale=heads.scale)
            for target, part in zip((into_q, into_k, into_v), found, strict=True):
                target[begin:] += _packed(part, layout)
        return rotate(into, cos, -sin, heads.queries + heads.keys), None, None, None, None


def _padded(tensor_MKD: Tensor, layout: Layout) -> Tensor:
    """(N, heads, T, D) of the packed completion tokens."""
    picked = tensor_MKD.view(*layout.own_NT.shape, *tensor_MKD.shape[1:]) if layout.even else tensor_MKD[layout.own_NT]
    return picked.transpose(1, 2)


def _packed(tensor_NKTD: Tensor, layout: Layout) -> Tensor:
    by_token = tensor_NKTD.transpose(1, 2)
    return by_token.reshape(-1, *by_token.shape[2:]) if layout.even else by_token[layout.valid_NT]


def masked_attention(heads_NKD: Tensor, cos: Tensor, sin: Tensor, heads: Heads, layout: Layout) -> Tensor:
    """The same from stock operations, for devices other than the CPU: prompts are computed once, but their keys copied per sample."""
    q, k, v = _split(heads, _Rotate.apply(heads_NKD, cos, sin, heads.queries + heads.keys))
    device = q.device
    lengths = torch.tensor([p.stop - p.start for p in layout.prompts], device=device)
    S = int(lengths.max())
    starts = torch.tensor([p.start for p in layout.prompts], device=device)
    place = torch.arange(S, device=device)
    inside_PS = place < lengths[:, None]
    prompt_PS = starts[:, None] + torch.where(inside_PS, place, 0)
    options = {"scale": heads.scale, "enable_gqa": heads.keys != heads.queries}
    q_p, k_p, v_p = (x[prompt_PS].transpose(1, 2) for x in (q, k, v))
    prompts = F.scaled_dot_product_attention(q_p, k_p, v_p, is_causal=True, **options)
    parts = [prompts.transpose(1, 2)[inside_PS]]
    if layout.shared:
        begin, T = layout.begin, layout.own_NT.shape[1]
        q_c, k_c, v_c = (x[begin:][layout.own_NT].transpose(1, 2) for x in (q, k, v))
        keys, values = (torch.cat([p[layout.prompt_of_N], c], dim=2) for p, c in ((k_p, k_c), (v_p, v_c)))
        causal_TT = torch.ones(T, T, dtype=torch.bool, device=device).tril()
        mask = torch.cat([inside_PS[layout.prompt_of_N][:, None].expand(-1, T, -1), causal_TT.expand(len(q_c), T, T)], dim=2)
        own = F.scaled_dot_product_attention(q_c, keys, values, attn_mask=mask[:, None], **options)
        parts.append(own.transpose(1, 2)[layout.valid_NT])
    return torch.cat(parts).flatten(1)


def shared_attention(heads_NKD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, heads: Heads, layout: Layout) -> Tensor:
    """(N, queries x D): causal attention of prompts, and of completions to their prompt and to themselves."""
    if heads_NKD.device.type == "cpu":
        return _SharedAttention.apply(heads_NKD, cos_N1D, sin_N1D, heads, layout)
    return masked_attention(heads_NKD, cos_N1D, sin_N1D, heads, layout)


# --- head


class _ScoreRows(Function):
    """Figures of each row's next-token distribution, and how they change with the row's features.

    A figure of one row has one gradient, so that is made on the way forward, while the distribution exists: two products with the head
    instead of three, and no logits are kept.
    """

    @staticmethod
    def forward(ctx, features_NH, score: Callable[..., Any], rows: int, *inputs):
        scored = [score(*chunk) for chunk in zip(*(x.split(rows) for x in (features_NH, *inputs)), strict=True)]
        figures, slopes = (
            [None if parts[0] is None else torch.cat(parts) for parts in zip(*half, strict=True)] for half in zip(*scored, strict=True)
        )
        ctx.save_for_backward(*slopes)
        ctx.mark_non_differentiable(*(f for f, slope in zip(figures, slopes, strict=True) if f is not None and slope is None))
        return tuple(figures)

    @staticmethod
    def backward(ctx, *grads):
        parts = [slope * g[:, None] for g, slope in zip(grads, ctx.saved_tensors, strict=True) if g is not None and slope is not None]
        return sum(parts[1:], parts[0]), *(None for _ in ctx.needs_input_grad[1:])


def score_rows(features_NH: Tensor, score: Callable[..., Any], rows: int, *inputs: Tensor) -> tuple[Tensor | None, ...]:
    """score(features, *inputs) on `rows` rows at a time, differentiable in the features.

    `score` returns its figures, each (N,) or None, and their gradients with respect to the features, each (N, H) or None.
    """
    return _ScoreRows.apply(features_NH, score, rows, *inputs)
