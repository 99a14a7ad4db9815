"""Parameters assembled from a checkpoint's tensors and put on their devices."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxllm.model_config import ModelConfig
from jaxllm.models import loader
from jaxllm.models.families import LLAMA, PHI3
from jaxllm.models.loader import load_params
from jaxllm.models.tensor_names import with_one_added

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB, LAYERS = 10, 6, 3, 4, 12, 15, 2
GROUP = HEADS // KV_HEADS

CONFIG = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    num_layers=LAYERS,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=INTERMEDIATE,
    max_position_embeddings=32,
    attention_bias=True,
    mlp_bias=True,
)
PARAMS = {
    "embed.weight": ((VOCAB, HIDDEN), ("tensor",)),
    "final_norm.scale": ((HIDDEN,), ()),
    "lm_head.weight": ((VOCAB, HIDDEN), ("tensor",)),
} | {
    f"layers.{i}.{name}": value
    for i in range(LAYERS)
    for name, value in {
        "attention_norm.scale": ((HIDDEN,), ()),
        "attention.qkv.weight": ((KV_HEADS, GROUP + 2, HEAD_DIM, HIDDEN), ("tensor",)),
        "attention.qkv.bias": ((KV_HEADS, GROUP + 2, HEAD_DIM), ("tensor",)),
        "attention.out.weight": ((HIDDEN, HEADS, HEAD_DIM), (None, "tensor")),
        "attention.out.bias": ((HIDDEN,), ()),
        "mlp_norm.scale": ((HIDDEN,), ()),
        "mlp.gate_up.weight": ((INTERMEDIATE, 2, HIDDEN), ("tensor",)),
        "mlp.gate_up.bias": ((INTERMEDIATE, 2), ("tensor",)),
        "mlp.down.weight": ((HIDDEN, INTERMEDIATE), (None, "tensor")),
        "mlp.down.bias": ((HIDDEN,), ()),
    }.items()
}
"""Parameters of the tiny model: shape and partition."""

LAYER_TENSORS = {
    "input_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    "self_attn.q_proj.bias": (HEADS * HEAD_DIM,),
    "self_attn.k_proj.bias": (KV_HEADS * HEAD_DIM,),
    "self_attn.v_proj.bias": (KV_HEADS * HEAD_DIM,),
    "self_attn.o_proj.bias": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
    "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    "mlp.gate_proj.bias": (INTERMEDIATE,),
    "mlp.up_proj.bias": (INTERMEDIATE,),
    "mlp.down_proj.bias": (HIDDEN,),
}


class MemoryCheckpoint:
    """A Llama checkpoint whose tensors are in memory."""

    path = "memory"
    family = LLAMA
    names = LLAMA.hf_names
    config = CONFIG

    def __init__(self):
        rng = np.random.default_rng(1)
        shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
        for i in range(LAYERS):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in LAYER_TENSORS.items()}
        self.tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        self.num_reads = 0

    @property
    def shapes(self):
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name):
        self.num_reads += 1
        return self.tensors[name]


@pytest.fixture
def checkpoint():
    return MemoryCheckpoint()


def make_specs(dtype=jnp.float32, num_devices=1):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tensor",))
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
        for name, (shape, axes) in PARAMS.items()
    }


def test_every_parameter_has_its_spec(checkpoint):
    specs = make_specs()
    params = load_params(checkpoint, specs)
    assert list(params) == list(specs)
    for name, spec in specs.items():
        assert (params[name].shape, params[name].dtype) == (spec.shape, spec.dtype)
        assert params[name].sharding == spec.sharding


def test_plain_parameters_are_copied(checkpoint):
    params, tensors = load_params(checkpoint, make_specs()), checkpoint.tensors
    np.testing.assert_array_equal(params["embed.weight"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["lm_head.weight"], tensors["lm_head.weight"])
    np.testing.assert_array_equal(params["final_norm.scale"], tensors["model.norm.weight"])
    np.testing.assert_array_equal(
        params["layers.1.mlp_norm.scale"], tensors["model.layers.1.post_attention_layernorm.weight"]
    )
    np.testing.assert_array_equal(params["layers.1.mlp.down.bias"], tensors["model.layers.1.mlp.down_proj.bias"])


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_queries_lie_beside_their_key_and_value(checkpoint, part):
    qkv = load_params(checkpoint, make_specs())[f"layers.1.attention.qkv.{part}"]
    tensors = (checkpoint.tensors[f"model.layers.1.self_attn.{name}_proj.{part}"] for name in "qkv")
    q, k, v = (tensor.reshape(-1, HEAD_DIM, *tensor.shape[1:]) for tensor in tensors)
    for kv_head in range(KV_HEADS):
        for member in range(GROUP):
            np.testing.assert_array_equal(qkv[kv_head, member], q[kv_head * GROUP + member])
        np.testing.assert_array_equal(qkv[kv_head, GROUP], k[kv_head])
        np.testing.assert_array_equal(qkv[kv_head, GROUP + 1], v[kv_head])


@pytest.mark.parametrize("group", [GROUP, 1])
def test_a_scale_of_all_heads_lies_beside_each_query(checkpoint, group):
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, HEAD_DIM)).astype(np.float32)
    found = load_one(checkpoint, "qk_norm.scale", (group + 1, HEAD_DIM), {"q_norm.weight": q, "k_norm.weight": k})
    np.testing.assert_array_equal(found, [q] * group + [k])


def test_scales_of_single_heads_lie_as_the_heads_do(checkpoint):
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal(heads * HEAD_DIM).astype(np.float32) for heads in (HEADS, KV_HEADS))
    shape = (KV_HEADS, GROUP + 1, HEAD_DIM)
    found = load_one(checkpoint, "qk_norm.scale", shape, {"q_norm.weight": q, "k_norm.weight": k})
    np.testing.assert_array_equal(found[:, :GROUP].reshape(-1), q)
    np.testing.assert_array_equal(found[:, GROUP].reshape(-1), k)


def load_one(checkpoint, name, shape, tensors):
    """A parameter of the attention layer that the tiny model does not have."""
    checkpoint.tensors |= {f"model.layers.0.self_attn.{name}": tensor for name, tensor in tensors.items()}
    path = f"layers.0.attention.{name}"
    specs = make_specs() | {path: jax.ShapeDtypeStruct(shape, jnp.float32)}
    return np.asarray(load_params(checkpoint, specs)[path])


def test_a_tensor_may_hold_all_parts_of_a_parameter(checkpoint):
    expected = load_params(checkpoint, make_specs())
    fused = MemoryCheckpoint()
    fused.names = PHI3.hf_names  # which has the biases apart
    for i in range(LAYERS):
        join(fused.tensors, f"model.layers.{i}.self_attn.", ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        join(fused.tensors, f"model.layers.{i}.mlp.", ("gate_proj", "up_proj"), "gate_up_proj")
    for name, param in load_params(fused, make_specs()).items():
        np.testing.assert_array_equal(param, expected[name])


def join(tensors, prefix, parts, whole):
    rows = [tensors.pop(f"{prefix}{part}.weight") for part in parts]
    tensors[f"{prefix}{whole}.weight"] = np.concatenate(rows)


def test_a_tensor_of_several_parts_is_misshapen_as_one(checkpoint):
    checkpoint.names = PHI3.hf_names
    checkpoint.tensors["model.layers.1.mlp.gate_up_proj.weight"] = np.zeros((3, HIDDEN), np.float32)
    message = errors_of(checkpoint)
    assert f"model.layers.1.mlp.gate_up_proj.weight [3, {HIDDEN}] instead of [{2 * INTERMEDIATE}, {HIDDEN}]" in message


def test_tensors_are_changed_as_the_family_says(checkpoint):
    checkpoint.names = with_one_added(LLAMA.hf_names)
    checkpoint.tensors = {name: tensor.astype(jnp.bfloat16) for name, tensor in checkpoint.tensors.items()}
    params = load_params(checkpoint, make_specs())
    stored = checkpoint.tensors["model.layers.0.input_layernorm.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["layers.0.attention_norm.scale"], stored + 1)
    np.testing.assert_array_equal(
        params["embed.weight"], checkpoint.tensors["model.embed_tokens.weight"].astype(np.float32)
    )


def test_linear_maps_compute_the_same(checkpoint):
    params, tensors = load_params(checkpoint, make_specs()), checkpoint.tensors
    rng = np.random.default_rng(2)
    hidden, heads = rng.standard_normal(HIDDEN), rng.standard_normal((HEADS, HEAD_DIM))
    inner = rng.standard_normal(INTERMEDIATE)
    layer = {name.removeprefix("layers.0."): np.asarray(param) for name, param in params.items()}
    own = {name.removeprefix("model.layers.0."): tensor for name, tensor in tensors.items()}

    out = np.einsum("nd,hnd->h", heads, layer["attention.out.weight"])
    np.testing.assert_allclose(out, own["self_attn.o_proj.weight"] @ heads.reshape(-1))
    gate, up = (layer["mlp.gate_up.weight"] @ hidden + layer["mlp.gate_up.bias"]).T
    np.testing.assert_allclose(gate, own["mlp.gate_proj.weight"] @ hidden + own["mlp.gate_proj.bias"])
    np.testing.assert_allclose(up, own["mlp.up_proj.weight"] @ hidden + own["mlp.up_proj.bias"])
    np.testing.assert_allclose(layer["mlp.down.weight"] @ inner, own["mlp.down_proj.weight"] @ inner)


def test_each_device_gets_its_slice(checkpoint):
    if len(jax.devices()) < 3:
        pytest.skip("needs 3 devices")
    whole = load_params(checkpoint, make_specs())
    specs = make_specs(num_devices=3)
    for name, param in load_params(checkpoint, specs).items():
        assert param.sharding == specs[name].sharding
        assert len(param.addressable_shards) == 3
        for shard in param.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(whole[name])[shard.index])


def test_parameters_are_cast(checkpoint):
    params = load_params(checkpoint, make_specs(jnp.bfloat16))
    for name, param in load_params(checkpoint, make_specs()).items():
        np.testing.assert_array_equal(params[name], param.astype(jnp.bfloat16))


def test_half_precision_tensors_are_widened_exactly(checkpoint):
    halves = {name: tensor.astype(jnp.bfloat16) for name, tensor in checkpoint.tensors.items()}
    checkpoint.tensors = halves
    params = load_params(checkpoint, make_specs())
    expected = halves["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["embed.weight"], expected)


def test_parameters_do_not_change_with_the_file(checkpoint):
    params = load_params(checkpoint, make_specs())
    before = np.array(params["embed.weight"])
    checkpoint.tensors["model.embed_tokens.weight"][:] = 0
    np.testing.assert_array_equal(params["embed.weight"], before)


def test_only_a_few_parameters_are_held_at_once(checkpoint, monkeypatch):
    most_ahead = 0
    num_put = 0

    def put(host, spec):
        nonlocal most_ahead, num_put
        num_put += 1
        most_ahead = max(most_ahead, checkpoint.num_reads - num_put)
        return host

    monkeypatch.setattr(loader, "_put", put)
    specs = {name: make_specs()[name] for name in ("embed.weight", "final_norm.scale", "lm_head.weight")}
    scales = {name: spec for name, spec in make_specs().items() if name.endswith("scale")}
    monkeypatch.setattr(loader, "_check_tensors", lambda *_: None)
    load_params(checkpoint, specs | scales)
    assert num_put == len(specs | scales)
    assert most_ahead <= loader.READERS


def test_without_a_sharding_the_default_device_is_taken(checkpoint):
    specs = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in make_specs().items()}
    params = load_params(checkpoint, specs)
    assert params["embed.weight"].sharding == SingleDeviceSharding(jax.devices()[0])


def test_harmless_tensors_are_ignored(checkpoint):
    checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(HEAD_DIM // 2, np.float32)
    load_params(checkpoint, make_specs())


def test_a_head_that_repeats_the_embedding_is_ignored(checkpoint):
    checkpoint.config = ModelConfig(**{**vars(CONFIG), "tie_word_embeddings": True})
    specs = {name: spec for name, spec in make_specs().items() if name != "lm_head.weight"}
    assert "lm_head.weight" not in load_params(checkpoint, specs)


def errors_of(checkpoint):
    with pytest.raises(ValueError) as error:
        load_params(checkpoint, make_specs())
    assert checkpoint.num_reads == 0, "found before anything was read"
    return str(error.value)


def test_missing_tensors_are_named(checkpoint):
    del checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    assert "missing: model.layers.1.mlp.up_proj.weight." in errors_of(checkpoint)


def test_unused_tensors_are_named(checkpoint):
    checkpoint.tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(HEAD_DIM, np.float32)
    assert "unused: model.layers.0.self_attn.q_norm.weight." in errors_of(checkpoint)


def test_misshapen_tensors_are_named(checkpoint):
    name = "model.layers.0.self_attn.k_proj.weight"
    checkpoint.tensors[name] = checkpoint.tensors[name].T
    expected = [KV_HEADS * HEAD_DIM, HIDDEN]
    assert f"misshapen: {name} {expected[::-1]} instead of {expected}." in errors_of(checkpoint)


def test_all_problems_are_told_at_once_but_not_all_names(checkpoint):
    for name in [name for name in checkpoint.tensors if "bias" in name]:
        checkpoint.tensors[name + "_of_another_kind"] = checkpoint.tensors.pop(name)
    message = errors_of(checkpoint)
    assert "missing: " in message
    assert "unused: " in message
    assert f"and {7 * LAYERS - 3} more" in message
    assert len(message) < 1000


def test_an_error_while_reading_is_passed_on(checkpoint, monkeypatch):
    def fail(name):
        raise ValueError(f"cannot read {name}")

    monkeypatch.setattr(checkpoint, "read", fail)
    with pytest.raises(ValueError, match=r"cannot read model\.embed_tokens\.weight"):
        load_params(checkpoint, make_specs())


class Terminal:
    def __init__(self, is_terminal):
        self.written = ""
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        self.written += text

    def flush(self):
        pass


@pytest.mark.parametrize(
    ("is_terminal", "progress", "shown"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_progress_is_shown_on_a_terminal_only(checkpoint, monkeypatch, is_terminal, progress, shown):
    terminal = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    load_params(checkpoint, make_specs(), progress=progress)
    assert ("Loading weights" in terminal.written) is shown
