"""A tiny Llama with 9 query and 3 K/V heads, as a folder, and what it has to answer.

`Oracle` computes the model densely in float64 NumPy, sharing nothing with the engine: no paging, no
batching, no XLA. `check_answer` holds an answer of the engine against it, position by position. What
turns logits into a sampled token is the engine's own functions, which have tests of their own.
"""

import dataclasses
import json
import random
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from toy_tokenizers import byte_level

from jaxllm.kernels.gumbel import gumbel
from jaxllm.kernels.sampling import find_threshold, summarize
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS, CONTEXT = 48, 9, 3, 16, 96, 270, 2, 160
THETA, EPS = 10000.0, 1e-5
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
CLOSE = 1e-3
"""Where the best two (perturbed) logits are closer than this, either may come."""


def make_weights() -> dict[str, np.ndarray]:
    """Random weights by Hugging Face's names, large enough that attention and logits are far from uniform."""
    rng = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * 5, "lm_head.weight": matrix(VOCAB, HIDDEN) * 2}
    weights["model.norm.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    return weights


def write_model(folder: Path, **config) -> Path:
    """The model as a Hugging Face folder, with a byte-level tokenizer and a chat template."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    safetensors.numpy.save_file(make_weights(), folder / "model.safetensors")
    byte_level().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


class Oracle:
    """The dense model."""

    def __init__(self) -> None:
        self.weights = {name: weight.astype(np.float64) for name, weight in make_weights().items()}

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """Float64 [tokens, vocab]."""
        x = self.weights["model.embed_tokens.weight"][token_ids]
        for layer in range(LAYERS):
            named = {key: self.weights[f"model.layers.{layer}.{key}.weight"] for key in self._layer_names()}
            x = x + self._attention(_norm(x, named["input_layernorm"]), named)
            h = _norm(x, named["post_attention_layernorm"])
            gate = h @ named["mlp.gate_proj"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ named["mlp.up_proj"].T)) @ named["mlp.down_proj"].T
        return _norm(x, self.weights["model.norm.weight"]) @ self.weights["lm_head.weight"].T

    def _layer_names(self) -> list[str]:
        start = "model.layers.0."
        return [name.removeprefix(start).removesuffix(".weight") for name in self.weights if name.startswith(start)]

    def _attention(self, h: np.ndarray, named: dict[str, np.ndarray]) -> np.ndarray:
        q, k, v = ((h @ named[f"self_attn.{name}_proj"].T).reshape(len(h), -1, HEAD_DIM) for name in ("q", "k", "v"))
        q, k = _rotate(q), _rotate(k).repeat(HEADS // KV_HEADS, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM)
        scores = np.where(np.tri(len(h), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, v.repeat(HEADS // KV_HEADS, axis=1))
        return out.reshape(len(h), -1) @ named["self_attn.o_proj"].T


def _norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale


def _rotate(x: np.ndarray) -> np.ndarray:
    """As complex numbers: dimension i and i + HEAD_DIM / 2 are one."""
    half = HEAD_DIM // 2
    angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def check_answer(oracle: Oracle, output: RequestOutput, params: SamplingParams, logprobs: list[float]) -> float:
    """Asserts that every token is the one the oracle takes after the tokens before it, unless it is a close call.

    Returns the largest difference of a log-probability from the oracle's.
    """
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
    logits = oracle.logits(prompt + answer)[len(prompt) - 1 : -1]
    perturbed = _perturb(logits, prompt, answer, params)
    best = np.sort(perturbed, axis=-1)[:, ::-1]
    for position, token in enumerate(answer):
        is_best = token == perturbed[position].argmax()
        is_close = perturbed[position][token] > best[position][0] - CLOSE
        assert is_best or is_close, f"{output.request_id}: token {token} at {position} is not the oracle's"
    exact = logits[np.arange(len(answer)), answer] - np.log(np.exp(logits).sum(-1))
    return float(np.abs(exact - logprobs).max())


def penalize(logits: np.ndarray, prompt: list[int], answer: list[int], params: SamplingParams) -> np.ndarray:
    """Logits of each token of an answer, less the penalties on what came before it."""
    logits = logits.astype(np.float64)
    for position, row in enumerate(logits):
        before = np.bincount(answer[:position], minlength=VOCAB)
        came = before > 0
        came[prompt] = True
        penalty = params.repetition_penalty
        row[came] = np.where(row[came] > 0, row[came] / penalty, row[came] * penalty)
        row -= params.frequency_penalty * before + params.presence_penalty * (before > 0)
    return logits


def _perturb(logits: np.ndarray, prompt: list[int], answer: list[int], params: SamplingParams) -> np.ndarray:
    """What the argmax is taken of: penalised, filtered, with the noise of the request's seed."""
    rows = len(answer)
    adjusted = jnp.asarray(penalize(logits, prompt, answer, params), jnp.float32)
    if params.greedy:
        return np.asarray(adjusted)
    seed = params.seed or 0
    scale, top_k, top_p = (jnp.full(rows, number) for number in (1 / params.temperature, params.top_k, params.top_p))
    min_p = jnp.full(rows, params.min_p)
    threshold = find_threshold(adjusted, summarize(adjusted, scale), scale, top_k, top_p, min_p)
    key = jnp.tile(jnp.asarray([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32), (rows, 1))
    noise = gumbel(key, len(prompt) + jnp.arange(rows), VOCAB)
    return np.asarray(jnp.where(adjusted >= threshold[:, None], adjusted / params.temperature + noise, -jnp.inf))


def make_params(index: int, num_tokens: int) -> SamplingParams:
    """Greedy for every other request, else sampled under a seed, in all combinations of filters."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    if index % 2 == 0:
        return dataclasses.replace(params, repetition_penalty=1.3 if index % 4 else 1.0)
    filters = [
        {"min_p": 0.02},
        {"top_k": 20, "presence_penalty": 0.5, "logprobs": 2},
        {"top_p": 0.8},
        {"top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    ]
    return dataclasses.replace(params, temperature=0.8, seed=1000 + index, **filters[index // 2 % 4])


def make_prompt(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
