"""Tokenizers from GGUF metadata and from Hugging Face folders, and chat templates."""

import json
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxllm.engine.gguf_tokenizer import gguf_backend, gguf_chat_templates, gguf_special_tokens
from jaxllm.engine.tokenizer import Tokenizer, load_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["cases"]

CONTROL, USER_DEFINED = 3, 4
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<s>", "</s>", "<tool>"]
TOKENS = [*SPECIAL, *ALPHABET, "he", "ll", "hell", "12"]
METADATA = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [CONTROL, CONTROL, USER_DEFINED] + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": ["h e", "l l", "he ll", "1 2"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
CHAT = [{"role": "user", "content": "Hi <b>"}]
CHATML = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def from_metadata(**changes):
    metadata = METADATA | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    templates = gguf_chat_templates(metadata)
    return Tokenizer(gguf_backend(metadata), gguf_special_tokens(metadata), templates)


def tokens_of(tokenizer, text, **options):
    return [tokenizer.id_to_token(index) for index in tokenizer.encode(text, **options)]


def pieces(pre, text):
    """How text is split before merging, with spaces and line ends as they were."""
    backend = gguf_backend(METADATA | {"tokenizer.ggml.pre": pre})
    assert backend.pre_tokenizer is not None
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.fixture(scope="module")
def demo_tokenizer(demo_model):
    return load_tokenizer(demo_model)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: str(case["prompt"])[:30])
def test_golden_prompts(demo_tokenizer, case):
    prompt = case["prompt"]
    is_text = isinstance(prompt, str)
    ids = demo_tokenizer.encode(prompt) if is_text else demo_tokenizer.encode_chat(prompt)
    assert ids == case["prompt_ids"]
    assert demo_tokenizer.decode(case["gen"], skip_special_tokens=False) == case["text"]


def test_demo_tokenizer(demo_tokenizer):
    assert demo_tokenizer.vocab_size == 49152
    assert demo_tokenizer.special_ids == frozenset(range(17))
    assert (demo_tokenizer.bos_token_id, demo_tokenizer.eos_token_id) == (1, 2)
    assert demo_tokenizer.id_to_token(2) == "<|im_end|>"
    assert demo_tokenizer.has_chat_template


@pytest.mark.parametrize("text", ["Hello  world\n\n", "naïve ½ 2018 漢字 🙂", "<|im_start|>user", "\x00\t"])
def test_decoding_gives_the_text_back(demo_tokenizer, text):
    assert demo_tokenizer.decode(demo_tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_left_out(demo_tokenizer):
    ids = demo_tokenizer.encode("<|im_start|>user")
    assert ids[0] == 1
    assert demo_tokenizer.decode(ids) == "user"


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "Hello  world 2018!\n\nI'm", ["Hello", " ", " world", " 2018", "!", "\n", "\n", "I", "'m"]),
        ("smollm", "in 2018 I'm", ["in", " ", "2", "0", "1", "8", " I", "'m"]),
        ("llama-bpe", "in 12345 I'LL.\n\nx", ["in", " ", "123", "45", " I", "'LL", ".\n\n", "x"]),
        ("qwen2", "in 123 I'LL.\n\nx", ["in", " ", "1", "2", "3", " I", "'LL", ".\n\n", "x"]),
        ("dbrx", "in 12345 I'LL.\n\nx", ["in", " ", "123", "45", " I", "'LL", ".\n\n", "x"]),
        ("gpt-4o", "parseHTTPText I'LL 1234.\n/x", ["parse", "HTTPText", " I'LL", " ", "123", "4", ".\n/", "x"]),
        ("tekken", "parseHTTPText I'm 12", ["parse", "HTTPText", " I", "'m", " ", "1", "2"]),
        ("default", "a $12345, b", ["a", " ", "$", "123", "45", ",", " b"]),
    ],
)
def test_text_is_split_as_the_file_says(pre, text, expected):
    assert pieces(pre, text) == expected


def test_a_file_that_does_not_say_is_split_the_default_way():
    metadata = {key: value for key, value in METADATA.items() if key != "tokenizer.ggml.pre"}
    default = gguf_backend(METADATA | {"tokenizer.ggml.pre": "default"})
    assert gguf_backend(metadata).to_str() == default.to_str()


def test_qwen2_composes_characters():
    decomposed, composed = "e\u0301", "\u00e9"
    assert from_metadata(pre="qwen2").encode(decomposed) == from_metadata(pre="qwen2").encode(composed)
    assert from_metadata(pre="gpt-2").encode(decomposed) != from_metadata(pre="gpt-2").encode(composed)


def test_llama3_takes_whole_tokens_whatever_the_merges_say():
    metadata = METADATA | {"tokenizer.ggml.merges": [], "tokenizer.ggml.pre": "llama-bpe"}
    assert gguf_backend(metadata).encode("hell", add_special_tokens=False).tokens == ["hell"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["hell"]),
        ({"add_bos_token": True}, ["<s>", "hell"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "hell", "</s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "hell"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["hell"]),
    ],
)
def test_begin_and_end_tokens(changes, expected):
    tokenizer = from_metadata(**changes)
    assert tokens_of(tokenizer, "hell") == expected
    assert tokens_of(tokenizer, "hell", add_special_tokens=False) == ["hell"]


def test_added_tokens_are_matched_as_a_whole():
    tokenizer = from_metadata()
    ids = tokenizer.encode("he<tool></s>he")
    assert [tokenizer.id_to_token(index) for index in ids] == ["he", "<tool>", "</s>", "he"]
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.decode(ids) == "he<tool>he"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he<tool></s>he"


@pytest.mark.parametrize("end", ["eos_token_id", "eot_token_id", "eom_token_id"])
def test_end_tokens_are_special_whatever_their_type(end):
    tokenizer = from_metadata(token_type=[1] * len(TOKENS), **{"eos_token_id": 1, end: 2})
    assert tokenizer.special_ids == {0, 1, 2} - ({1} if end == "eos_token_id" else set())


def test_unknown_ids_decode_to_nothing():
    tokenizer = from_metadata()
    assert tokenizer.decode([*tokenizer.encode("hell"), len(TOKENS) + 5]) == "hell"
    assert tokenizer.id_to_token(len(TOKENS)) is None
    assert tokenizer.vocab_size == len(TOKENS)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.pre": "bloom"}, ["tokenizer.ggml.pre='bloom'", "smollm", "tokenizer="]),
        ({"tokenizer.ggml.model": "rwkv"}, ["tokenizer.ggml.model='rwkv'", "gpt2", "llama", "tokenizer="]),
    ],
)
def test_unknown_kinds_are_refused(changes, named):
    with pytest.raises(ValueError) as error:
        gguf_backend(METADATA | changes)
    assert not [text for text in named if text not in str(error.value)]


def test_gguf_without_tokenizer_names_the_file(tmp_path):
    path = tmp_path / "bare.gguf"
    writer = GGUFWriter(path, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"bare\.gguf: metadata tokenizer\.ggml\.tokens is missing"):
        load_tokenizer(path)


def test_gguf_chat_templates():
    key = "tokenizer.chat_template"
    assert gguf_chat_templates({}) == {}
    named = {"tokenizer.chat_templates": ["tool_use"], f"{key}.tool_use": "tools", key: "plain"}
    assert gguf_chat_templates(named) == {"default": "plain", "tool_use": "tools"}


@pytest.fixture
def folder(tmp_path):
    """A folder with a byte-level tokenizer.json that pads and truncates, as some do."""
    vocab = {token: index for index, token in enumerate(TOKENS)}
    backend = Backend(models.BPE(vocab, [("h", "e"), ("l", "l"), ("he", "ll"), ("1", "2")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    write_settings(tmp_path)
    return tmp_path


def write_settings(folder, **changes):
    settings = {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>", "unk_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changes))


def test_folder(folder):
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_ids == {0, 1}
    assert tokens_of(tokenizer, "hello 12") == ["hell", "o", "Ġ", "12"]  # neither padded nor cut
    assert not tokenizer.has_chat_template


def test_folder_without_tokenizer_config(folder):
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).eos_token_id is None
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert load_tokenizer(folder).eos_token_id == 1


def declare(content, index):
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    return {str(index): {"content": content, **flags}}


def test_tokens_that_only_the_settings_declare(folder):
    declared = declare("<|call|>", len(TOKENS)) | declare("<tool>", 2)
    write_settings(folder, added_tokens_decoder=declared)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("he<tool><|call|>") == [TOKENS.index("he"), 2, len(TOKENS)]
    assert tokenizer.special_ids == {0, 1, 2, len(TOKENS)}


def test_settings_that_do_not_go_with_the_tokenizer(folder):
    write_settings(folder, added_tokens_decoder=declare("<|call|>", 4000))
    with pytest.raises(ValueError, match=r"tokenizer\.json does not go with.*<\|call\|>.*4000"):
        load_tokenizer(folder)


def test_broken_tokenizer_json(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read.*download it again"):
        load_tokenizer(folder)


def test_missing_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json: download it"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"nowhere.*does not exist"):
        load_tokenizer(tmp_path / "nowhere")


def test_sentencepiece_needs_transformers(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"tokenizer\.model but no tokenizer\.json: pip install 'jaxllm\[hf\]'"):
        load_tokenizer(tmp_path)


def test_sentencepiece_through_transformers(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    converted = SimpleNamespace(backend_tokenizer=gguf_backend(METADATA))
    auto = SimpleNamespace(from_pretrained=lambda path: converted if path == tmp_path else None)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=auto))
    assert tokens_of(load_tokenizer(tmp_path), "hell") == ["hell"]


@pytest.mark.parametrize(
    "template",
    ["single", [{"name": "default", "template": "single"}, {"name": "tool_use", "template": "tools"}]],
    ids=["string", "list"],
)
def test_template_in_the_settings(folder, template):
    write_settings(folder, chat_template=template)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.render_chat(CHAT) == "single"
    tools = "single" if template == "single" else "tools"
    assert tokenizer.render_chat(CHAT, tools=[{"name": "add"}]) == tools


def test_template_files_win(folder):
    write_settings(folder, chat_template="settings")
    (folder / "chat_template.json").write_text('{"chat_template": "legacy"}')
    assert load_tokenizer(folder).render_chat(CHAT) == "legacy"
    (folder / "chat_template.jinja").write_text("file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.render_chat(CHAT) == "file"
    assert tokenizer.render_chat(CHAT, tools=[{"name": "add"}]) == "tools"


def render(template, messages=CHAT, **variables):
    return Tokenizer(gguf_backend(METADATA), gguf_special_tokens(METADATA), {"default": template}).render_chat(
        messages, **variables
    )


def test_chat_is_encoded_without_more_special_tokens():
    tokenizer = Tokenizer(
        gguf_backend(METADATA | {"tokenizer.ggml.add_bos_token": True}), {"bos_token": "<s>"}, {"default": CHATML}
    )
    assert tokenizer.render_chat(CHAT) == "<s>user: Hi <b></s><s>assistant: "
    assert tokenizer.render_chat(CHAT, add_generation_prompt=False) == "<s>user: Hi <b></s>"
    ids = tokenizer.encode_chat(CHAT)
    assert ids[0] == 0
    assert ids.count(0) == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(CHAT)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}", "<s>Hi <b></s>"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <b>"}]'),
        ("{{ {'a': ['é']} | tojson(indent=1) }}", '{\n "a": [\n  "é"\n ]\n}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{{ thinking }}", "yes"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
    ],
)
def test_templates_are_rendered_as_transformers_does(template, expected):
    assert render(template, thinking="yes") == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[7].content }}", "refuses these messages"),
        ("{{ 'a' + 1 }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages.*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages.*unsafe"),
        ("a\n{% if %}", "template is broken, line 2"),
    ],
)
def test_template_failures(template, message):
    with pytest.raises(ValueError, match=message):
        render(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages=\[\] is not valid: give a list of at least one message"),
        ("Hello", "messages='Hello' is not valid"),
        ({"role": "user", "content": "Hi"}, "is not valid: give a list"),
        (["Hello"], r"messages\[0\]='Hello' is not valid: give a dict"),
        ([*CHAT, {"content": "Hi"}], r"messages\[1\] has role None: give a string"),
        ([{"role": 3, "content": "Hi"}], r"messages\[0\] has role 3: give a string"),
        ([{"role": "user"}], r"messages\[0\] has content None: give a string"),
        ([{"role": "user", "content": 3}], r"messages\[0\] has content 3: give a string"),
    ],
)
def test_malformed_messages(messages, message):
    with pytest.raises(ValueError, match=message):
        render(CHATML, messages)


def test_an_assistant_that_calls_tools_need_not_speak():
    assert render("{{ messages[0].tool_calls }}", [{"role": "assistant", "tool_calls": [1]}]) == "[1]"


def test_without_a_template():
    tokenizer = from_metadata()
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template: use generate"):
        tokenizer.render_chat(CHAT)


def test_named_templates_without_a_default():
    tokenizer = Tokenizer(gguf_backend(METADATA), {}, {"rag": "x"})
    with pytest.raises(ValueError, match=r"\['rag'\].*'default'"):
        tokenizer.render_chat(CHAT)


def test_other_threads_run_while_a_long_text_is_tokenized():
    tokenizer, begin, tokens = from_metadata(), threading.Event(), []

    def encode():
        begin.wait()
        tokens.extend(tokenizer.encode("hell o " * 50_000))

    thread = threading.Thread(target=encode)
    thread.start()
    begin.set()
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 10, "a server stands still meanwhile"
    assert tokenizer.decode(tokens) == "hell o " * 50_000
