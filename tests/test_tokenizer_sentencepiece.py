"""SentencePiece tokenizers of GGUF files, as Gemma's, Llama 2's and Phi-3's."""

import json
from pathlib import Path

import pytest

from jaxllm.engine.detokenizer import IncrementalDetokenizer, TextVocabulary
from jaxllm.engine.gguf_tokenizer import gguf_backend, gguf_chat_templates, gguf_special_tokens
from jaxllm.engine.tokenizer import Tokenizer, load_tokenizer
from jaxllm.models.hub import pull

LLAMA_CPP = json.loads((Path(__file__).parent / "data" / "gemma3_tokens.json").read_text())["cases"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
VOCABULARY = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
    ("▁h", -1.0, NORMAL),
    ("el", -2.0, NORMAL),
    ("▁hel", -3.0, NORMAL),
    ("lo", -4.0, NORMAL),
    ("▁▁", -5.0, NORMAL),
    ("hello", -6.0, UNUSED),
    *((character, -100.0 - index, NORMAL) for index, character in enumerate("▁helo<>x0A1\né")),
    ("<turn>", -1000.0, CONTROL),
    ("\n\n", -1000.0, USER_DEFINED),
    ("  ", -1000.0, USER_DEFINED),
    ("    ", -1000.0, USER_DEFINED),
]
TOKENS, SCORES, KINDS = map(list, zip(*VOCABULARY, strict=True))
METADATA = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.token_type": KINDS,
}
GEMMA = {"add_space_prefix": False}
GEMMA_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<turn>' + role + '\n' + message['content'] | trim + '</s>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)


def make(**changes):
    metadata = METADATA | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return Tokenizer(gguf_backend(metadata), gguf_special_tokens(metadata), gguf_chat_templates(metadata))


def tokens_of(tokenizer, text, **options):
    return [tokenizer.id_to_token(index) for index in tokenizer.encode(text, **options)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ["▁hel", "lo"]),  # the best score first: ▁h, el, ▁hel, lo
        (" hello", ["▁", "▁hel", "lo"]),  # its own space and the one in front
        ("", []),
        ("xé", ["▁", "x", "é"]),
        ("ü", ["▁", "<0xC3>", "<0xBC>"]),
        ("<0x0A>", ["▁", "<", "0", "x", "0", "A", ">"]),  # a byte's name is no byte
        ("a</s>hello", ["▁", "<0x61>", "</s>", "▁hel", "lo"]),  # each text of its own gets a space
        ("<s>\n\nhello", ["<s>", "\n\n", "▁hel", "lo"]),
        ("<unk>", ["<unk>"]),
    ],
)
def test_llama(text, expected):
    assert tokens_of(make(), text, add_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ["h", "el", "lo"]),
        (" hello", ["▁hel", "lo"]),
        ("h      \n\n\nh", ["h", "    ", "  ", "\n\n", "\n", "h"]),  # runs are matched whole, the longest first
        ("   h", ["  ", "▁h"]),
        ("<turn>h", ["<turn>", "h"]),
    ],
)
def test_gemma(text, expected):
    assert tokens_of(make(**GEMMA), text, add_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        *(({}, text) for text in ("hello", " hello", "x x", "é ü 漢\n")),
        *((GEMMA, text) for text in ("hello", " hello", "  x  x", "é ü 漢\n\n", "    1\n\n\nx")),
    ],
)
def test_decoding_gives_the_text_back(changes, text):
    tokenizer = make(**changes)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = IncrementalDetokenizer(TextVocabulary(tokenizer), [])
    assert "".join(stream.append([token_id]) for token_id in ids) + stream.flush() == text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["<s>", "▁hel", "lo"]),
        ({"add_bos_token": False}, ["▁hel", "lo"]),
        ({"add_eos_token": True}, ["<s>", "▁hel", "lo", "</s>"]),
        ({"bos_token_id": TOKENS.index("<turn>")}, ["<turn>", "▁hel", "lo"]),
    ],
)
def test_begin_and_end_tokens(changes, expected):
    assert tokens_of(make(**changes), "hello") == expected


def test_ids_that_the_file_does_not_say():
    tokenizer = make()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_ids == {0, 1, 2, TOKENS.index("<turn>")}
    assert tokenizer.vocab_size == len(TOKENS)


def test_what_neither_a_piece_nor_bytes_stand_for_is_unknown():
    without_bytes = [token for token in VOCABULARY if token[2] != BYTE]
    tokens, scores, kinds = map(list, zip(*without_bytes, strict=True))
    tokenizer = make(tokens=tokens, scores=scores, token_type=kinds)
    assert tokens_of(tokenizer, "h漢字", add_special_tokens=False) == ["▁h", "<unk>"]


def test_phi3_tokens_take_the_whitespace_after_them():
    text = "<turn>\nhello</s> x<s> x"
    assert tokens_of(make(), text)[1:6] == ["<turn>", "▁", "\n", "h", "el"]
    metadata = METADATA | {"general.architecture": "phi3"}
    tokens = [TOKENS[index] for index in gguf_backend(metadata).encode(text, add_special_tokens=False).ids]
    assert tokens == ["<turn>", "▁hel", "lo", "</s>", "▁", "x", "<s>", "▁▁", "x"]


@pytest.mark.parametrize(
    ("scores", "found"), [((), "is missing"), (SCORES[1:], rf"has {len(TOKENS) - 1} values for {len(TOKENS)} tokens")]
)
def test_scores_that_do_not_fit(scores, found):
    with pytest.raises(ValueError, match=rf"tokenizer\.ggml\.scores {found}: name a folder .* tokenizer="):
        make(scores=scores)


def test_a_chat_has_one_begin_token():
    tokenizer = Tokenizer(make(**GEMMA).backend, gguf_special_tokens(METADATA), {"default": GEMMA_TEMPLATE})
    chat = [{"role": "user", "content": " hello "}]
    assert tokenizer.render_chat(chat) == "<s><turn>user\nhello</s>\n<turn>model\n"
    ids = tokenizer.encode_chat(chat)
    assert [index for index in ids if index in tokenizer.special_ids] == [
        *tokenizer.encode("<s><turn></s><turn>", add_special_tokens=False)
    ]


@pytest.mark.parametrize(
    ("roles", "message"),
    [(["system", "user"], "System role not supported"), (["user", "user"], "roles must alternate")],
)
def test_a_template_refuses_roles(roles, message):
    tokenizer = Tokenizer(make(**GEMMA).backend, gguf_special_tokens(METADATA), {"default": GEMMA_TEMPLATE})
    with pytest.raises(ValueError, match=f"the model's chat template refuses these messages: .*{message}"):
        tokenizer.render_chat([{"role": role, "content": "hello"} for role in roles])


@pytest.mark.slow
def test_gemma_file_against_llama_cpp():
    tokenizer = load_tokenizer(pull("gemma3-270m"))
    wrong = [case["text"] for case in LLAMA_CPP if tokenizer.encode(case["text"]) != case["ids"]]
    assert not wrong
    assert tokenizer.vocab_size == 262144
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 1)
    assert tokenizer.decode([106]) == ""
    assert not tokenizer.has_chat_template
    for case in LLAMA_CPP:
        assert tokenizer.decode(case["ids"][1:], skip_special_tokens=False) == case["text"].replace("▁", " ")
