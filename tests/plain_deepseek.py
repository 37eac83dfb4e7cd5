"""Reference for DeepSeek-MoE, written from its formulas, token by token and head by head.

transformers does not include this family. The reference reads only config.json and the tensors, by their
published names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from core_reference import Maps
from safetensors.torch import load_file

from attncache_core.checkpoints.checkpoint import DroppedLayers


class PlainDeepseek:
    """The decoder of a checkpoint, one sequence at a time in float32."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {
            name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.heads: int = self.config["num_attention_heads"]

    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the last hidden states [L, hidden]."""
        return self._run(ids)[0]

    def maps(self, ids: Sequence[int]) -> dict[tuple[int, int], torch.Tensor]:
        """Return all attention maps [L, L], keyed by (layer, head)."""
        return self._run(ids)[1]

    def hidden_with_maps(self, ids: Sequence[int], replaced: Maps) -> torch.Tensor:
        """Return the last hidden states [L, hidden] with some heads' maps replaced."""
        return self._run(ids, replaced)[0]

    def hidden_without(self, ids: Sequence[int], dropped: DroppedLayers) -> torch.Tensor:
        """Return the last hidden states [L, hidden] without some layers or their attention."""
        return self._run(ids, dropped=dropped)[0]

    def token_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the logits [L, vocabulary] of each next token."""
        tied = self.config["tie_word_embeddings"]
        return self.hidden(ids) @ self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    @classmethod
    def class_scores(cls, folder: Path, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the logits [sequences, classes] of a sequence-classification checkpoint."""
        model = cls(folder)
        head = model.weights["score.weight"]
        return np.stack([(head @ model.hidden(ids)[-1]).numpy() for ids in sequences])

    def _run(
        self, ids: Sequence[int], replaced: Maps | None = None, dropped: DroppedLayers | None = None
    ) -> tuple[torch.Tensor, dict[tuple[int, int], torch.Tensor]]:
        replaced, dropped = replaced or {}, dropped or DroppedLayers()
        maps: dict[tuple[int, int], torch.Tensor] = {}
        x = self.weights["model.embed_tokens.weight"][list(ids)]
        for layer in range(self.config["num_hidden_layers"]):
            if layer in dropped.blocks:
                continue
            name = f"model.layers.{layer}"
            if layer not in dropped.attention:
                x = x + self._attention(layer, self._norm(f"{name}.input_layernorm", x), replaced, maps)
            y = self._norm(f"{name}.post_attention_layernorm", x)
            x = x + (
                self._block(f"{name}.mlp", y) if self._sparse(layer) else self._network(f"{name}.mlp", y)
            )
        return self._norm("model.norm", x), maps

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        size = (x**2).mean(dim=-1, keepdim=True) + self.config["rms_norm_eps"]
        return x / size.sqrt() * self.weights[f"{name}.weight"]

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        product = x @ self.weights[f"{name}.weight"].T
        return product + self.weights[f"{name}.bias"] if self.config["attention_bias"] else product

    def _attention(self, layer: int, x: torch.Tensor, replaced: Maps, maps: dict) -> torch.Tensor:
        name = f"model.layers.{layer}.self_attn"
        query, key, value = (self._linear(f"{name}.{part}_proj", x) for part in "qkv")
        width = query.shape[1] // self.heads
        group = self.heads // self.config["num_key_value_heads"]
        ahead = torch.ones(len(x), len(x)).triu(1).bool()
        contexts = []
        for head in range(self.heads):
            columns = slice(head * width, (head + 1) * width)
            shared = slice(head // group * width, (head // group + 1) * width)
            scores = self._turned(query[:, columns]) @ self._turned(key[:, shared]).T / math.sqrt(width)
            maps[layer, head] = torch.softmax(scores.masked_fill(ahead, -math.inf), dim=1)
            contexts.append(replaced.get((layer, head), maps[layer, head]) @ value[:, shared])
        return self._linear(f"{name}.o_proj", torch.cat(contexts, dim=1))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate Q or K of one head [L, width] by the tokens' positions."""
        old = {"rope_theta": self.config.get("rope_theta"), **(self.config.get("rope_scaling") or {})}
        rotary = self.config.get("rope_parameters", old)
        half = x.shape[1] // 2
        positions = torch.arange(len(x), dtype=torch.float64) / rotary.get("factor", 1.0)
        turned = torch.empty_like(x)
        for number in range(half):
            angles = positions * rotary["rope_theta"] ** (-number / half)
            cos, sin = angles.cos().float(), angles.sin().float()
            first, second = x[:, number], x[:, number + half]
            turned[:, number] = first * cos - second * sin
            turned[:, number + half] = second * cos + first * sin
        return turned

    def _sparse(self, layer: int) -> bool:
        config = self.config
        late = layer >= config["first_k_dense_replace"] and layer % config["moe_layer_freq"] == 0
        return bool(config["n_routed_experts"]) and late

    def _network(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        y = gate @ x[..., None]
        return (down @ (y * torch.sigmoid(y) * (up @ x[..., None])))[..., 0]

    def _block(self, name: str, x: torch.Tensor) -> torch.Tensor:
        made = []
        for token in x:
            scores = torch.softmax(self.weights[f"{name}.gate.weight"] @ token, dim=0).tolist()
            best = sorted(range(len(scores)), key=scores.__getitem__)[-self.config["num_experts_per_tok"] :]
            normalises = self.config["norm_topk_prob"] and len(best) > 1
            total = sum(scores[expert] for expert in best) if normalises else 1.0
            parts = [
                scores[expert] / total * self._network(f"{name}.experts.{expert}", token) for expert in best
            ]
            if self.config["n_shared_experts"]:
                parts.append(self._network(f"{name}.shared_experts", token))
            made.append(sum(parts))
        return torch.stack(made)
