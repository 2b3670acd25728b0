"""Prompts to sampled tokens: one prefill per prompt, its keys shared by the G samples, finished rows leaving, waiting prompts entering.

Rows stand in lines of equal width; those of one line share a prompt, so that one product reads its keys for all of them. Nothing here
makes the host wait for the device but a look at which rows have finished.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_cli.fast.decoder import Decoder
from grpo_cli.fast.ops import rotate, shared_attention
from grpo_cli.fast.packing import Packed, pack_prompts

DEVICE_CHECK_EVERY = 8
"""Tokens between two looks at which rows have finished, on devices where looking makes the host wait."""
PREFILL_TOKENS = 8192
"""Prompt tokens read at once."""
WORTH_MOVING = 0.75
"""The rows that still run move together when that leaves at most this share of the work per token."""

Choose = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits, row, t) -> token number t of each row, and its log-prob."""
Place = tuple[int, int, int]
"""Where a row stands: the number of its prompt, its line, its cell."""


def decode(
    decoder: Decoder, prompts: list[list[int]], G: int, T: int, rows_at_once: int, ends: Tensor, choose: Choose
) -> tuple[Tensor, Tensor]:
    """(N, T) tokens and log-probs of the N = prompts x G rows; what stands behind a row's end token is meaningless."""
    lines = _Lines(decoder, prompts, G, T, ends, choose)
    entered = 0
    while entered < len(prompts):
        end = min(len(prompts), entered + max(1, (rows_at_once - lines.running) // G))
        lines.enter(entered, end)
        entered = end
        lines.advance(until=max(0, rows_at_once - max(G, rows_at_once // 4)) if entered < len(prompts) else 0)
    return lines.tokens_NT[:-1], lines.logprobs_NT[:-1]


class _Lines:
    """The rows being decoded: L lines of R cells, in each cell one of the N rows, or one that is done and only fills its place."""

    def __init__(self, decoder: Decoder, prompts: list[list[int]], G: int, T: int, ends: Tensor, choose: Choose):
        self._decoder, self._prompts, self._G, self._T = decoder, prompts, G, T
        self._ends, self._choose, self._device = ends, choose, ends.device
        self._linears, self._to_logits = decoder.for_decoding()
        self._cos, self._sin = decoder.rotary(torch.arange(max(map(len, prompts)) + T, device=self._device))
        # The last row takes what the cells of rows that are done go on to write.
        self.tokens_NT = torch.zeros(len(prompts) * G + 1, T, dtype=torch.long, device=self._device)
        self.logprobs_NT = torch.zeros(len(prompts) * G + 1, T, device=self._device)
        self.running = 0
        """How many rows still run, as of the last look."""
        # Of each of the C = L x R cells: its row, how many tokens that has sampled, the last of these, and whether it runs.
        self._cells_4C = torch.zeros(4, 0, dtype=torch.long, device=self._device)
        self._prompt_L: list[int] = []
        self._width = G
        # Per layer keys and values: (L, keys, S, D) of the prompts, and (L, keys, R, columns, D) of the rows' own tokens, all of which
        # end in the same column.
        self._shared: list[tuple[Tensor, Tensor]] = []
        self._own: list[tuple[Tensor, Tensor]] = []
        self._column = 0

    # --- rows enter, and move together

    def enter(self, first: int, end: int) -> None:
        """Read the prompts numbered from `first` to `end`, and draw the first token of each of their rows."""
        entering, logits_PV = self._prefill(self._prompts[first:end])
        row = torch.arange(first * self._G, end * self._G, device=self._device)
        drawn_4C = torch.stack([row, torch.zeros_like(row), torch.zeros_like(row), torch.ones_like(row)])
        drawn_4C = self._drawn(logits_PV.repeat_interleave(self._G, dim=0), drawn_4C)
        lines, cells = len(self._prompt_L), self._cells_4C.shape[1]
        places = self._running_places()
        places += [(first + c // self._G, lines + c // self._G, cells + c) for c, runs in enumerate(drawn_4C[3].tolist()) if runs]
        self._cells_4C = torch.cat([self._cells_4C, drawn_4C], dim=1)
        self._arrange(places, entering)

    def _running_places(self) -> list[Place]:
        return [(self._prompt_L[c // self._width], c // self._width, c) for c, runs in enumerate(self._cells_4C[3].tolist()) if runs]

    def _arrange(self, places: list[Place], entering: list[tuple[Tensor, Tensor]] | None = None) -> None:
        """Keep the rows at `places` alone, in lines of the width that costs least; `entering` holds the keys of prompts to add."""
        self.running, old_cells = len(places), len(self._prompt_L) * self._width
        held = _by_prompt(places)
        self._width = _best_width([len(part) for part in held.values()], self._G)
        self._prompt_L, lines, cells, runs = [], [], [], []
        for prompt, part in held.items():
            for start in range(0, len(part), self._width):
                line = part[start : start + self._width]
                filled = line + line[:1] * (self._width - len(line))
                self._prompt_L.append(prompt)
                lines.append(line[0][1])
                cells += [cell for _, _, cell in filled]
                runs += [place < len(line) for place in range(self._width)]
        self._cells_4C = self._cells_4C[:, cells]
        self._cells_4C[3] = self._as_tensor(runs)
        if not places:
            self._shared = self._own = []
            return

        lengths = self._as_tensor([len(self._prompts[p]) for p in self._prompt_L])
        self._length_C = lengths.repeat_interleave(self._width)
        S = int(lengths.max())
        lines, source = self._as_tensor(lines), self._as_tensor(cells).clamp(max=max(0, old_cells - 1))
        fed_C = self._cells_4C[1] - 1
        kept = int(fed_C.max())
        shared, own = [], []
        for number in range(self._decoder.layers):
            parts = [kv[number] for kv in (self._shared, entering) if kv]
            shared.append(tuple(torch.cat([_resized(part[i], S) for part in parts])[lines] for i in (0, 1)))
            own.append(tuple(self._moved(number, i, source, kept, shared[-1][i], kept + self._T - 1 - int(fed_C.min())) for i in (0, 1)))
            for kv in (self._shared, entering, self._own):
                if kv:
                    kv[number] = None  # what has been copied goes layer by layer
        self._shared, self._own, self._column = shared, own, kept
        L, R = len(self._prompt_L), self._width
        place_S, place_K = torch.arange(S, device=self._device), torch.arange(kept, device=self._device)
        hidden_LS, hidden_CK = place_S >= lengths[:, None], place_K < kept - fed_C[:, None]
        self._hidden_shared = hidden_LS.view(L, 1, 1, 1, S) if hidden_LS.any() else None
        self._hidden_own = hidden_CK.view(L, 1, R, 1, kept) if hidden_CK.any() else None

    def _moved(self, number: int, i: int, source_C: Tensor, kept: int, like: Tensor, columns: int) -> Tensor:
        """The rows' own keys (i = 0) or values of a layer in their new places, with room to go on."""
        L, keys, _, D = like.shape
        moved = like.new_empty(L, keys, self._width, columns, D)
        if kept:
            old = self._own[number][i][:, :, :, self._column - kept : self._column]
            picked = old.transpose(1, 2).flatten(0, 1)[source_C]
            moved[:, :, :, :kept] = picked.unflatten(0, (L, self._width)).transpose(1, 2)
        return moved

    def _as_tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)

    # --- the model

    def _prefill(self, prompts: list[list[int]]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Per layer keys and values (P, keys, S, D), and the logits of each prompt's first token."""
        S, held = max(map(len, prompts)), [([], []) for _ in range(self._decoder.layers)]
        logits, start = [], 0
        while start < len(prompts):
            end, tokens = start + 1, len(prompts[start])
            while end < len(prompts) and tokens + len(prompts[end]) <= PREFILL_TOKENS:
                tokens, end = tokens + len(prompts[end]), end + 1
            logits.append(self._read(pack_prompts(prompts[start:end], self._device), S, held))
            start = end
        return [(torch.stack(k), torch.stack(v)) for k, v in held], torch.cat(logits)

    def _read(self, packed: Packed, S: int, held: list[tuple[list[Tensor], list[Tensor]]]) -> Tensor:
        """Logits behind each prompt; its keys and values (keys, S, D) are added to those held."""
        heads, cos, sin = self._decoder.heads, self._cos[packed.positions], self._sin[packed.positions]

        def attend(number: int, heads_NKD: Tensor) -> Tensor:
            turned = rotate(heads_NKD, cos, sin, heads.queries + heads.keys).transpose(0, 1)
            for into, first in zip(held[number], (heads.queries, heads.queries + heads.keys), strict=True):
                part = turned[first : first + heads.keys]
                into += [F.pad(part[:, prompt], (0, 0, 0, S - prompt.stop + prompt.start)) for prompt in packed.layout.prompts]
            return shared_attention(heads_NKD, cos, sin, heads, packed.layout)

        return self._logits(self._decoder.run(self._decoder.embed(packed.ids), attend, self._linears, packed.kept))

    def advance(self, until: int) -> None:
        """Decode until at most so many rows run."""
        steps = 0
        while self.running > until:
            self._step()
            steps += 1
            if self._device.type == "cpu" or steps % DEVICE_CHECK_EVERY == 0 or self._column == self._own[0][0].shape[3]:
                running = int(self._cells_4C[3].sum())
                if running < self.running:
                    self.running = running
                    if running > until:
                        self._tighten()

    def _tighten(self) -> None:
        places = self._running_places()
        counts = [len(part) for part in _by_prompt(places).values()]
        if _cost(counts, _best_width(counts, self._G)) <= WORTH_MOVING * len(self._prompt_L) * (self._width + 1):
            self._arrange(places)

    def _step(self) -> None:
        """One token more for every cell."""
        L, R = len(self._prompt_L), self._width
        heads, D, column = self._decoder.heads, self._decoder.head_dim, self._column
        position = (self._length_C + self._cells_4C[1] - 1).clamp(max=len(self._cos) - 1)
        cos, sin = self._cos[position], self._sin[position]
        repeats = heads.queries // heads.keys

        def attend(number: int, heads_CKD: Tensor) -> Tensor:
            (shared_k, shared_v), (own_k, own_v) = self._shared[number], self._own[number]
            S = shared_k.shape[2]
            turned = rotate(heads_CKD, cos, sin, heads.queries + heads.keys).view(L, R, -1, D)
            q, k, v = turned.split([heads.queries, heads.keys, heads.keys], dim=2)
            own_k[:, :, :, column], own_v[:, :, :, column] = k.transpose(1, 2), v.transpose(1, 2)
            q = (q * heads.scale).view(L, R, heads.keys, repeats, D).transpose(1, 2)
            to_prompt = q.reshape(L * heads.keys, R * repeats, D) @ shared_k.flatten(0, 1).transpose(1, 2)
            to_own = q.reshape(-1, repeats, D) @ own_k[:, :, :, : column + 1].flatten(0, 2).transpose(1, 2)
            to_prompt, to_own = to_prompt.view(L, heads.keys, R, repeats, S), to_own.view(L, heads.keys, R, repeats, column + 1)
            if self._hidden_shared is not None:
                to_prompt.masked_fill_(self._hidden_shared, -torch.inf)
            if self._hidden_own is not None:
                to_own[..., : self._hidden_own.shape[-1]].masked_fill_(self._hidden_own, -torch.inf)
            scores = torch.cat([to_prompt, to_own], dim=-1)
            shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype)
            of_prompt = shares.view(L * heads.keys, R * repeats, -1)[..., :S] @ shared_v.flatten(0, 1)
            of_own = shares.view(L * heads.keys * R, repeats, -1)[..., S:] @ own_v[:, :, :, : column + 1].flatten(0, 2)
            return of_own.add_(of_prompt.view_as(of_own)).view(L, heads.keys, R, -1).transpose(1, 2).reshape(L * R, -1)

        hidden = self._decoder.run(self._decoder.embed(self._cells_4C[2]), attend, self._linears)
        self._column += 1
        self._cells_4C = self._drawn(self._logits(hidden), self._cells_4C)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits, bias = self._to_logits(self._decoder.final_norm(hidden)), self._decoder.head.bias
        return logits if bias is None else logits + bias

    def _drawn(self, logits_CV: Tensor, cells_4C: Tensor) -> Tensor:
        """The cells with one token more."""
        row, sampled, _, runs = cells_4C
        t = sampled.clamp(max=self._T - 1)
        token, logprob = self._choose(logits_CV, row, t)
        target = torch.where(runs.bool(), row, len(self.tokens_NT) - 1)
        self.tokens_NT[target, t] = token
        self.logprobs_NT[target, t] = logprob
        runs = runs * ~torch.isin(token, self._ends) * (sampled + 1 < self._T)
        return torch.stack([row, sampled + 1, token, runs])


def _by_prompt(places: list[Place]) -> dict[int, list[Place]]:
    held: dict[int, list[Place]] = {}
    for place in places:
        held.setdefault(place[0], []).append(place)
    return held


def _best_width(counts: list[int], most: int) -> int:
    """Cells per line for so many rows of each prompt: wide lines read a prompt's keys once for many rows, narrow ones waste fewer cells."""
    widths = [most, *(2**power for power in range(most.bit_length()) if 2**power < most)]
    return min(widths, key=lambda width: _cost(counts, width))


def _cost(counts: list[int], width: int) -> int:
    """Work per token, in cells: reading a prompt's keys for a line costs about as much as one cell more."""
    return sum(-(-count // width) * (width + 1) for count in counts)


def _resized(tensor_LKSD: Tensor, S: int) -> Tensor:
    return F.pad(tensor_LKSD, (0, 0, 0, max(0, S - tensor_LKSD.shape[2])))[:, :, :S]
