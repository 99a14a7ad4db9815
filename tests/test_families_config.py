"""Configurations of the families as they are published, in every spelling that is about."""

import math

import pytest

from jaxllm.model_config import LayerKind, ModelConfig, RopeConfig
from jaxllm.models.families import family_of_gguf, family_of_hf

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
}
GGUF_SIZES = {
    "embedding_length": 512,
    "feed_forward_length": 1024,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "block_count": 4,
    "context_length": 8192,
}
PLAIN = LayerKind()


def from_hf(architecture, without=(), **fields) -> ModelConfig:
    given = {name: value for name, value in SIZES.items() if name not in without}
    return family_of_hf([architecture]).config_from_hf(given | fields)


def from_gguf(arch, tensors=(), **metadata) -> ModelConfig:
    metadata = {f"{arch}.{key.replace('__', '.')}": value for key, value in (GGUF_SIZES | metadata).items()}
    shapes = {"token_embd.weight": (1000, 512)} | dict.fromkeys(tensors, (1,))
    return family_of_gguf(arch).config_from_gguf({"general.architecture": arch, **metadata}, shapes)


def test_mistral_has_a_window_unless_it_says_null():
    assert from_hf("MistralForCausalLM").layers == (LayerKind(4096),) * 4
    assert from_hf("MistralForCausalLM", sliding_window=1024).layers == (LayerKind(1024),) * 4
    assert from_hf("MistralForCausalLM", sliding_window=None).layers == ()


def test_a_window_as_long_as_the_context_is_none():
    assert from_hf("MistralForCausalLM", sliding_window=8192).layers == ()
    assert from_hf("Phi3ForCausalLM", sliding_window=262144).layers == ()
    assert from_gguf("phi3", attention__sliding_window=8192).layers == ()


def test_qwen2_has_biases_and_slides_only_if_it_says_so():
    config = from_hf("Qwen2ForCausalLM", sliding_window=1024, max_window_layers=3)
    assert config.attention_bias
    assert not config.attention_out_bias
    assert config.layers == ()
    config = from_hf("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=1024, max_window_layers=3)
    assert config.layers == (PLAIN, PLAIN, PLAIN, LayerKind(1024))


def test_qwen_with_yarn_gets_the_extended_context():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    config = from_hf("Qwen2ForCausalLM", rope_theta=1e6, rope_scaling=scaling)
    assert config.max_position_embeddings == 32768
    assert config.rope == RopeConfig(1e6, "yarn", 4.0, 1.0, 32.0, 8192, attention_factor=0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(8) + 1) / (0.1 * math.log(8) + 1)),
    ],
    ids=["attention_factor", "mscales-alike", "mscales"],
)
def test_yarn_attention_factor(fields, factor):
    scaling = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    rope = from_hf("LlamaForCausalLM", rope_parameters=scaling | fields).rope
    assert rope.attention_factor == pytest.approx(factor)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.truncate) == (2, 16, False)
    assert rope.original_max_position == 8192


def test_qwen3_has_heads_of_their_own_size():
    config = from_hf("Qwen3ForCausalLM")
    assert config.head_dim == 128
    assert config.qk_norm == "head"
    assert not config.attention_bias


def test_gemma2_by_default():
    config = from_hf("Gemma2ForCausalLM")
    assert config.layers == (LayerKind(4096), PLAIN) * 2
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert (config.head_dim, config.attention_scale, config.activation) == (256, None, "gelu_tanh")
    assert config.norms == "around"
    assert config.scale_embeddings
    assert config.tie_word_embeddings


def test_gemma2_of_27b_has_a_scale_of_its_own():
    config = from_hf("Gemma2ForCausalLM", query_pre_attn_scalar=144, head_dim=128)
    assert config.attention_scale == pytest.approx(144**-0.5)


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_gguf_leaves_the_scale_of_27b_to_the_number_of_layers(arch, layers):
    sizes = {"block_count": layers, "attention.key_length": 128, "attention.value_length": 128}
    assert from_gguf(arch, **sizes).attention_scale == (512 / 8) ** -0.5
    assert from_gguf(arch, **(sizes | {"block_count": 26})).attention_scale is None


GEMMA3_ROPE = RopeConfig(1000000.0)
GEMMA3_LOCAL = LayerKind(512, RopeConfig(10000.0))


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window_pattern": 3},
        {"sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None},
        {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
    ],
    ids=["short", "transformers 4", "transformers 5"],
)
def test_gemma3_has_two_kinds_of_layers(fields):
    config = from_hf("Gemma3ForCausalLM", sliding_window=512, **fields)
    assert config.rope == GEMMA3_ROPE
    assert config.layers == (GEMMA3_LOCAL, GEMMA3_LOCAL, PLAIN, GEMMA3_LOCAL)
    assert config.layer_ropes == tuple(kind.rope or GEMMA3_ROPE for kind in config.layers)


def test_gemma3_that_sees_keeps_most_fields_to_itself():
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"intermediate_size": 10240, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "eos_token_id": 1}
    fields = {"text_config": text, "vision_config": {"hidden_size": 1152}, "eos_token_id": [1, 106]}
    config = from_hf("Gemma3ForConditionalGeneration", without=SIZES, **fields, dtype="bfloat16")
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.rope == RopeConfig(1000000.0, "linear", 8.0)
    assert config.layers[4:7] == (LayerKind(1024, RopeConfig(10000.0)), PLAIN, LayerKind(1024, RopeConfig(10000.0)))
    assert (config.eos_token_ids, config.dtype) == ((1, 106), "bfloat16")


def test_gemma3_that_looks_ahead_is_refused():
    with pytest.raises(ValueError, match="use_bidirectional_attention=True"):
        from_hf("Gemma3ForCausalLM", use_bidirectional_attention=True)


@pytest.mark.parametrize("kind", ["su", "longrope"])
def test_phi3_with_longrope(kind):
    long, short = [float(n) for n in range(1, 33)], [1.0] * 32
    scaling = {"type": kind, "long_factor": long, "short_factor": short}
    sizes = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    config = from_hf("Phi3ForCausalLM", rope_scaling=scaling, **sizes)
    rope = config.rope
    assert (rope.freq_factors, rope.short_freq_factors) == (tuple(long), tuple(short))
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert config.for_context(4097) == config
    assert config.for_context(4096).rope.freq_factors == tuple(short)


def test_phi3_rotates_a_part_of_each_head():
    assert from_hf("Phi3ForCausalLM", partial_rotary_factor=0.75).rope.rotary_dim == 48
    assert from_hf("Phi3ForCausalLM", rope_parameters={"partial_rotary_factor": 0.5}).rope.rotary_dim == 32
    assert from_gguf("phi3", rope__dimension_count=48).rope.rotary_dim == 48
    assert from_gguf("phi3", rope__dimension_count=64).rope.rotary_dim is None


def test_olmo2():
    config = from_hf("Olmo2ForCausalLM")
    assert (config.norms, config.qk_norm, config.rms_norm_eps) == ("after", "all", 1e-5)


def test_olmo3_scales_only_layers_that_see_everything():
    scaling = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2, "original_max_position_embeddings": 8192}
    config = from_hf("Olmo3ForCausalLM", rope_theta=500000, rope_scaling=scaling)
    assert config.layers == (*[LayerKind(4096, RopeConfig(500000.0))] * 3, PLAIN)
    assert (config.rope.scaling, config.rope.theta) == ("yarn", 500000.0)


def test_gguf_windows():
    assert from_gguf("gemma2").layers == (LayerKind(4096), PLAIN) * 2
    config = from_gguf("gemma3", attention__sliding_window=512, block_count=7)
    assert config.layers == (*[GEMMA3_LOCAL] * 5, PLAIN, GEMMA3_LOCAL)
    pattern = [True, False, False, True]
    config = from_gguf("gemma3", attention__sliding_window=512, attention__sliding_window_pattern=pattern)
    assert config.layers == (GEMMA3_LOCAL, PLAIN, PLAIN, GEMMA3_LOCAL)


def test_gguf_scalings():
    rope = from_gguf("gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0).rope
    assert rope == RopeConfig(1000000.0, "linear", 8.0)
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 2048}
    rope = from_gguf("qwen2", **{f"rope.scaling.{key}": value for key, value in scaling.items()}).rope
    assert rope == RopeConfig(10000.0, "yarn", 4.0, 1.0, 32.0, 2048, attention_factor=0.1 * math.log(4) + 1)
