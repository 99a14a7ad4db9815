"""Configuration and names of model families, from both file formats."""

import pytest

from jaxllm.model_config import ModelConfig, RopeConfig
from jaxllm.models.families import FAMILIES, LLAMA, family_of_gguf, family_of_hf, supported

SMOLLM2_HF = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
SMOLLM2 = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    max_position_embeddings=8192,
    rms_norm_eps=1e-05,
    rope=RopeConfig(theta=100000.0),
    tie_word_embeddings=True,
    dtype="bfloat16",
    eos_token_ids=(2,),
)
LLAMA31_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA31_ROPE = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)

SMOLLM2_GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-05,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.eos_token_id": 2,
}
SHAPES = {"token_embd.weight": (49152, 576)}


def from_hf(**changes):
    return LLAMA.config_from_hf(SMOLLM2_HF | changes)


def from_gguf(shapes=SHAPES, **changes):
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return LLAMA.config_from_gguf(SMOLLM2_GGUF | changes, shapes)


def test_hf_config():
    assert from_hf() == SMOLLM2


def test_hf_defaults_are_those_of_transformers():
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    config = LLAMA.config_from_hf({name: SMOLLM2_HF[name] for name in needed})
    assert config.num_kv_heads == 9
    assert config.max_position_embeddings == 2048
    assert config.rms_norm_eps == 1e-6
    assert config.rope == RopeConfig(10000.0)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()
    assert config.dtype == "float32"


def test_hf_head_dim_can_be_given():
    assert from_hf(head_dim=128).head_dim == 128
    assert from_hf(head_dim=None).head_dim == 64


def test_hf_biases():
    config = from_hf(attention_bias=True, mlp_bias=True)
    assert config.attention_bias
    assert config.attention_out_bias
    assert config.mlp_bias


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 9], (7, 9)), (None, ())])
def test_hf_eos_token_id(value, ids):
    assert from_hf(eos_token_id=value).eos_token_ids == ids


def test_hf_dtype_of_transformers_5():
    fields = {name: value for name, value in SMOLLM2_HF.items() if name != "torch_dtype"}
    assert LLAMA.config_from_hf(fields | {"dtype": "float16"}).dtype == "float16"


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA31_SCALING},
        {"rope_theta": None, "rope_parameters": LLAMA31_SCALING | {"rope_theta": 500000.0}},
    ],
    ids=["rope_scaling", "rope_parameters"],
)
def test_llama31_rope_in_both_spellings(fields):
    assert from_hf(max_position_embeddings=131072, **fields).rope == LLAMA31_ROPE


def test_default_rope_in_the_new_spelling():
    rope = {"rope_theta": 250.0, "rope_type": "default"}
    assert from_hf(rope_theta=None, rope_parameters=rope).rope == RopeConfig(250.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"sliding_window": 4096}, ["sliding_window", "4096"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq", "GGUF"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "1", "num_hidden_layers", "30"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "'yarn'"]),
        ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [1]}}, ["mrope", "'llama3'"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, ["longrope", "long_factor"]),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}}, ["longrope", "1", "32"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn", "bfloat16"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"num_hidden_layers": "30"}, ["num_hidden_layers", "'30'"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_hf_refuses_what_it_would_ignore(changes, named):
    with pytest.raises(ValueError) as error:
        from_hf(**changes)
    assert not [text for text in named if text not in str(error.value)]


def test_an_unused_sliding_window_is_no_obstacle():
    assert from_hf(sliding_window=4096, use_sliding_window=False) == SMOLLM2


def test_gguf_config():
    assert from_gguf() == ModelConfig(**{**vars(SMOLLM2), "dtype": "float32"})


def test_gguf_defaults():
    optional = ("llama.attention.head_count_kv", "llama.rope.freq_base", "tokenizer.ggml.eos_token_id")
    metadata = {key: value for key, value in SMOLLM2_GGUF.items() if key not in optional}
    config = LLAMA.config_from_gguf(metadata, SHAPES)
    assert config.num_kv_heads == 9
    assert config.rope.theta == 10000.0
    assert config.eos_token_ids == ()


def test_gguf_says_by_its_tensors_what_the_model_has():
    assert not from_gguf(SHAPES | {"output.weight": (49152, 576)}).tie_word_embeddings
    assert from_gguf(SHAPES | {"blk.0.attn_q.bias": (576,)}).attention_bias
    assert from_gguf(SHAPES | {"blk.0.attn_output.bias": (576,)}).attention_out_bias
    assert from_gguf(SHAPES | {"blk.0.ffn_gate.bias": (1536,)}).mlp_bias


def test_gguf_head_dim_can_be_given():
    dims = {"attention__key_length": 128, "attention__value_length": 128, "rope__dimension_count": 128}
    assert from_gguf(**{f"llama.{name}": value for name, value in dims.items()}).head_dim == 128


def test_gguf_ends_of_turn_end_answers_too():
    changes = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    assert from_gguf(**changes).eos_token_ids == (2, 9)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.expert_count", 8),
        ("llama.attention.sliding_window", 4096),
        ("llama.attn_logit_softcapping", 50.0),
        ("llama.rope.scaling.type", "dynamic"),
        ("llama.rope.scaling.yarn_log_multiplier", 0.1),
        ("llama.rope.scale_linear", 4.0),
        ("llama.rope.dimension_count", 32),
        ("llama.attention.value_length", 32),
        ("llama.attention.head_count_kv", [3, 9]),
        ("llama.block_count", 0),
        ("llama.context_length", None),
    ],
)
def test_gguf_refuses_what_it_would_ignore(key, value):
    with pytest.raises(ValueError, match=key):
        from_gguf(**{key: value})


def test_gguf_without_an_embedding_is_no_model():
    with pytest.raises(ValueError, match=r"token_embd\.weight"):
        from_gguf({})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.hf_architectures[0])
def test_families_are_found_by_architecture(family):
    for architecture in family.hf_architectures:
        assert family_of_hf(["SomethingElse", architecture]) is family
    assert family_of_gguf(family.gguf_architecture).gguf_architecture == family.gguf_architecture


def test_of_families_with_one_gguf_architecture_the_general_one_reads_the_files():
    assert family_of_gguf("llama") is LLAMA


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("Qwen2MoeForCausalLM", "Qwen2ForCausalLM"),
        ("Gemma3nForCausalLM", "Gemma3ForCausalLM"),
        ("Llama4ForCausalLM", "LlamaForCausalLM"),
        ("Phi4ForCausalLM", "Phi3ForCausalLM"),
    ],
)
def test_an_unknown_architecture_is_named_with_the_nearest_supported_one(unknown, nearest):
    with pytest.raises(ValueError, match=rf"{unknown}.* nearest that is: {nearest}\.") as error:
        family_of_hf([unknown])
    assert "Olmo2ForCausalLM" in str(error.value)


def test_an_unknown_gguf_architecture_is_named_with_the_nearest_supported_one():
    with pytest.raises(ValueError, match=r"'qwen2moe'.* nearest that is: qwen2\."):
        family_of_gguf("qwen2moe")


def test_no_architecture_at_all():
    with pytest.raises(ValueError, match=r"architectures=\[\]"):
        family_of_hf([])


def test_the_table_of_families():
    rows = supported()
    assert len(rows) == len(FAMILIES)
    assert {"qwen3", "Qwen3ForCausalLM"} < {cell for row in rows for cell in row}
    assert all(all(row) for row in rows)


def test_sources_of_a_parameter():
    assert LLAMA.hf_names.sources_of("layers.12.attention.qkv.bias") == (
        "model.layers.12.self_attn.q_proj.bias",
        "model.layers.12.self_attn.k_proj.bias",
        "model.layers.12.self_attn.v_proj.bias",
    )
    assert LLAMA.gguf_names.sources_of("layers.3.mlp.gate_up.weight") == (
        "blk.3.ffn_gate.weight",
        "blk.3.ffn_up.weight",
    )
    assert LLAMA.gguf_names.sources_of("final_norm.scale") == ("output_norm.weight",)


def test_a_model_that_sees_has_its_text_half_below_a_prefix():
    names = family_of_hf(["Gemma3ForConditionalGeneration"]).hf_names
    assert names.sources_of("layers.3.mlp_norm.scale") == (
        "language_model.model.layers.3.pre_feedforward_layernorm.weight",
    )
    tied = from_hf()
    assert names.is_ignored("vision_tower.vision_model.post_layernorm.weight", tied)
    assert names.is_ignored("multi_modal_projector.mm_soft_emb_norm.weight", tied)
    assert names.is_ignored("language_model.lm_head.weight", tied)
    assert not names.is_ignored("language_model.model.norm.weight", tied)


def test_a_parameter_without_names_is_a_mistake_in_the_family():
    with pytest.raises(AssertionError, match=r"layers\.0\.attention\.sinks"):
        LLAMA.hf_names.sources_of("layers.0.attention.sinks")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.hf_architectures[0])
def test_both_formats_name_the_same_parameters(family):
    assert family.hf_names.sources.keys() == family.gguf_names.sources.keys()


def test_harmless_tensors():
    tied, untied = from_hf(), from_hf(tie_word_embeddings=False)
    assert LLAMA.hf_names.is_ignored("model.layers.0.self_attn.rotary_emb.inv_freq", untied)
    assert LLAMA.hf_names.is_ignored("lm_head.weight", tied)
    assert not LLAMA.hf_names.is_ignored("lm_head.weight", untied)
    assert not LLAMA.hf_names.is_ignored("model.layers.0.self_attn.q_norm.weight", tied)
    assert not LLAMA.gguf_names.is_ignored("rope_freqs.weight", untied)
    scaled = from_hf(rope_scaling={"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32})
    assert LLAMA.gguf_names.is_ignored("rope_freqs.weight", scaled)
