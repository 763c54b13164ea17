"""A plain NumPy twin of EAGLE-3 and P-EAGLE heads, from their files in the layout of speculators, or of vLLM: one entry
after the other, each over a list of those before it, in float64. It knows no pages, no masks and none of our code."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import erf, softmax

Memory = list[list[tuple[int, np.ndarray, np.ndarray]]]  # layer by layer: position, keys and values of each entry


class DenseHead:
    def __init__(self, raw: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        self.raw, self.layer = dict.fromkeys(flags, False) | raw, raw.get("transformer_layer_config", raw)
        self.tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
        self.is_gemma = self.layer["model_type"] == "gemma4_text"

    def drafts(self, aux: np.ndarray, token_ids: np.ndarray, at: int, steps: int) -> list[np.ndarray]:
        """The logits of a chain over the text, behind the entry of token at + 1, which has the hidden states aux[at].
        Tokens and states are those of one document, from its first."""
        state, memory = self._known(aux, token_ids, at)
        found = [self._logits(state)]
        for position in range(at + 2, at + 1 + steps):
            state = self._run(token_ids[position], state, position, memory)
            found.append(self._logits(state))
        return found

    def foreseen(self, aux: np.ndarray, token_ids: np.ndarray, at: int, slots: int) -> list[np.ndarray]:
        """The logits of that entry and of the masked slots after it."""
        state, memory = self._known(aux, token_ids, at)
        found, feature = [self._logits(state)], self._fuse(self.tensors["mask_hidden"][0, 0])
        for position in range(at + 2, at + 1 + slots):
            found.append(self._logits(self._run(self.raw["mask_token_id"], feature, position, memory)))
        return found

    def block(self, aux: np.ndarray, token_id: int, slots: int) -> np.ndarray:  # [slot, vocab]
        """The logits of a block of DSpark behind the tokens whose hidden states are aux: its anchor and masked slots,
        all of which see each other."""
        context = self._norm(self._linear(aux, "fc"), "hidden_norm")
        tokens = (token_id, *(self.raw["mask_token_id"],) * (slots - 1))
        x = [self._embedded(token) for token in tokens]
        for i in range(self.layer["num_hidden_layers"]):
            name = f"layers.{i}"
            at = f"{name}.self_attn"
            seen = [self._project(at, row, position)[1:] for position, row in enumerate(context)]
            own = [self._norm(row, f"{name}.input_layernorm") for row in x]
            own = [self._project(at, row, len(aux) + slot) for slot, row in enumerate(own)]
            seen += [(keys, values) for _, keys, values in own]
            x = [self._after(name, row, self._read(at, q, seen)) for row, (q, _, _) in zip(x, own, strict=True)]
        return np.stack([self._logits(row) for row in x])

    def _known(self, aux: np.ndarray, token_ids: np.ndarray, at: int) -> tuple[np.ndarray, Memory]:
        memory: Memory = [[] for _ in range(self.layer["num_hidden_layers"])]
        state = np.zeros(0)
        for before in range(at + 1):
            state = self._run(token_ids[before + 1], self._fuse(aux[before]), before + 1, memory)
        return state, memory

    def _fuse(self, aux: np.ndarray) -> np.ndarray:
        if self.raw["norm_before_fc"]:
            aux = self._norm(aux, "input_norm")
        if self.raw["fc_norm"]:
            parts = np.split(aux, sum(name.startswith("fc_norm.") for name in self.tensors))
            aux = np.concatenate([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        return self._linear(aux, "fc")

    def _run(self, token_id: int, hidden: np.ndarray, position: int, memory: Memory) -> np.ndarray:
        first = "layers.0"
        token, x = self._norm(self._embedded(token_id), f"{first}.input_layernorm"), hidden
        normed = self._norm(hidden, f"{first}.hidden_norm")
        if self.raw["norm_before_residual"]:
            x = normed
        taken = np.concatenate([token, normed])
        for i, entries in enumerate(memory):
            if i:
                taken = self._norm(x, f"layers.{i}.input_layernorm")
            out = self._attend(f"layers.{i}.self_attn", taken, position, self._window(i), entries)
            x = self._after(f"layers.{i}", x, out)
        return self._norm(x, "norm") if self.raw["norm_output"] else x

    def _embedded(self, token_id: int) -> np.ndarray:
        scale = np.sqrt(self.layer["hidden_size"]) if self.is_gemma else 1.0
        return self.tensors["embed_tokens.weight"][token_id] * scale

    def _after(self, name: str, x: np.ndarray, attended: np.ndarray) -> np.ndarray:
        """The stream after a layer, of which attention has been computed."""
        if not self.is_gemma:
            x = x + attended
            return x + self._mlp(f"{name}.mlp", self._norm(x, f"{name}.post_attention_layernorm"))
        x = x + self._norm(attended, f"{name}.post_attention_layernorm")
        out = self._mlp(f"{name}.mlp", self._norm(x, f"{name}.pre_feedforward_layernorm"))
        return (x + self._norm(out, f"{name}.post_feedforward_layernorm")) * self.tensors[f"{name}.layer_scalar"]

    def _window(self, i: int) -> float:
        kinds = self.layer.get("layer_types")
        return self.layer["sliding_window"] if kinds and kinds[i] == "sliding_attention" else np.inf

    def _attend(self, name: str, x: np.ndarray, position: int, window: float, entries: list[Any]) -> np.ndarray:
        if "kv_lora_rank" in self.layer:
            q, k, v = self._from_latents(name, x, position)
        else:
            q, k, v = self._project(name, x, position)
        entries.append((position, k, v))
        return self._read(name, q, [(keys, values) for there, keys, values in entries if position - there < window])

    def _read(self, name: str, q: np.ndarray, seen: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        group, out = len(q) // len(seen[0][0]), []
        for head, query in enumerate(q):
            scores = np.array([query @ keys[head // group] for keys, _ in seen])
            scores = scores if self.is_gemma else scores / np.sqrt(len(query))
            out.append(softmax(scores) @ np.stack([values[head // group] for _, values in seen]))
        return self._linear(np.concatenate(out), f"{name}.o_proj")

    def _project(self, name: str, x: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        width = self.layer["global_head_dim" if self.is_gemma else "head_dim"]
        parts = ("q", "k", "k" if self.layer.get("attention_k_eq_v") else "v")
        q, k, v = (self._linear(x, f"{name}.{part}_proj").reshape(-1, width) for part in parts)
        if self.is_gemma:
            v = v / np.sqrt(np.mean(v**2, axis=-1, keepdims=True) + self.layer["rms_norm_eps"])
        if self.is_gemma or self.layer["model_type"] == "qwen3":
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        return self._turn(q, position), self._turn(k, position), v

    def _from_latents(self, name: str, x: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, keys and values of every head (DeepSeek-V2, arXiv 2405.04434, section 2.1). Neighbours turn against
        each other."""
        num_heads, nope, rank = (self.layer[key] for key in ("num_attention_heads", "qk_nope_head_dim", "kv_lora_rank"))
        q = self._linear(self._norm(self._linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm"), f"{name}.q_b_proj")
        down = self._linear(x, f"{name}.kv_a_proj_with_mqa")
        up = self._linear(self._norm(down[:rank], f"{name}.kv_a_layernorm"), f"{name}.kv_b_proj")
        q, up = q.reshape(num_heads, -1), up.reshape(num_heads, -1)
        shared = np.broadcast_to(self._turn(_apart(down[None, rank:]), position), (num_heads, len(down) - rank))
        q = np.concatenate([q[:, :nope], self._turn(_apart(q[:, nope:]), position)], axis=1)
        return q, np.concatenate([up[:, :nope], shared], axis=1), up[:, nope:]

    def _turn(self, x: np.ndarray, position: int) -> np.ndarray:  # [head, head_dim]
        half, stated = x.shape[1] // 2, self.layer
        if self.is_gemma:
            stated = self.layer["rope_parameters"]["full_attention"]
        angles = position * stated["rope_theta"] ** (-np.arange(half) / half)
        if self.is_gemma:
            angles[int(stated["partial_rotary_factor"] * half) :] = 0.0
        one, other = x[:, :half], x[:, half:]
        return np.concatenate(
            [one * np.cos(angles) - other * np.sin(angles), other * np.cos(angles) + one * np.sin(angles)], axis=1
        )

    def _mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gate, up = self._linear(x, f"{name}.gate_proj"), self._linear(x, f"{name}.up_proj")
        if self.is_gemma or self.layer["hidden_act"] == "gelu_pytorch_tanh":
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        elif self.layer["hidden_act"] == "gelu":
            gate = 0.5 * gate * (1 + erf(gate / np.sqrt(2)))
        else:
            gate = gate / (1 + np.exp(-gate))
        return self._linear(gate * up, f"{name}.down_proj")

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        size = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.layer["rms_norm_eps"])
        return x / size * self.tensors[f"{name}.weight"]

    def _logits(self, state: np.ndarray) -> np.ndarray:
        normed = state if self.raw["norm_output"] else self._norm(state, "norm")
        logits, cap = normed @ self.tensors["lm_head.weight"].T, self.layer.get("final_logit_softcapping")
        return cap * np.tanh(logits / cap) if cap else logits


def _apart(x: np.ndarray) -> np.ndarray:
    """Put neighbours that turn against each other as far apart as `_turn` has them."""
    return np.concatenate([x[:, ::2], x[:, 1::2]], axis=1)


def spans(lengths: tuple[int, ...]) -> list[slice]:
    """The places of documents that stand one after the other in a row."""
    return [slice(start, stop) for start, stop in itertools.pairwise(itertools.accumulate(lengths, initial=0))]
