"""Makes tests/data/hf_processors.npz and tests/data/hf_beams.json: what transformers makes of logits and of beams.

    python3.11 -m venv ENV && ENV/bin/pip install torch transformers   # torch for CPUs is enough
    ENV/bin/python scripts/make_sampling_golden.py

Made with Python 3.11, torch 2.13 and transformers 5.24. The first file has random `logits`, the `token_ids` before
them, and for each processor the logits that it returns. The second has the hypotheses of beam searches with the
checkpoints of tests/data/tiny, best first, and their scores.
"""

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

# Of an environment of its own, not of this project's.
torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
ROWS, VOCAB, LENGTH, PROMPT_LENGTH = 6, 50, 12, 4
EOS = [3, 7]
BIASES = {5: 1.5, 9: -2.0, 20: 100.0, 31: -100.0, 49: 0.25}


def make_processors(token_ids: Any) -> dict[str, Any]:
    """Some that apply to `token_ids`; bad words end as the first rows go on, and as none does."""
    rows = token_ids.tolist()
    words = [[11], [*rows[0][-1:], 4], [*rows[1][-2:], 12], [*rows[2][-3:], 13], [*rows[3][-3:-1], 14], [48, 49, 1]]
    bias = [[[token], amount] for token, amount in BIASES.items()]
    early, late = (
        transformers.MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, LENGTH - PROMPT_LENGTH + more, EOS)
        for more in (1, 0)
    )
    return {
        "repetition_penalty": transformers.RepetitionPenaltyLogitsProcessor(1.3),
        "repetition_reward": transformers.RepetitionPenaltyLogitsProcessor(0.6),
        "bad_words": transformers.NoBadWordsLogitsProcessor(words),
        "logit_bias": transformers.SequenceBiasLogitsProcessor(bias),
        "min_tokens": early,
        "min_tokens_reached": late,
        "temperature": transformers.TemperatureLogitsWarper(0.7),
        "top_k": transformers.TopKLogitsWarper(7),
        "top_p": transformers.TopPLogitsWarper(0.8),
        "min_p": transformers.MinPLogitsWarper(0.1),
    }


def make_processed() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.standard_normal((ROWS, VOCAB)).astype(np.float32) * 3)
    token_ids = torch.tensor(rng.integers(0, VOCAB, (ROWS, LENGTH)))
    processors = make_processors(token_ids)
    processed = {name: processor(token_ids, logits.clone()).numpy() for name, processor in processors.items()}
    words = [word for word in processors["bad_words"].bad_word_ids if word not in ([token] for token in EOS)]
    padded = np.full((len(words), max(map(len, words))), -1, np.int32)
    for row, word in zip(padded, words, strict=True):
        row[len(row) - len(word) :] = word
    return {"logits": logits.numpy(), "token_ids": token_ids.numpy().astype(np.int32), "words": padded, **processed}


def search(model: Any, prompt: list[int], **options: Any) -> dict[str, Any]:
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_return_sequences=options["num_beams"],
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    beams = []
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        answer = sequence[len(prompt) :]
        ends = [answer.index(token) for token in model.generation_config.eos_token_id if token in answer]
        beams.append({"token_ids": answer[: min(ends) + 1] if ends else answer, "score": score})
    return {"prompt": prompt, **options, "beams": beams}


def make_beams(name: str) -> list[dict[str, Any]]:
    folder = DATA / "tiny" / name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    token_ids = np.load(folder / "expected.npz")["token_ids"].reshape(-1).tolist()
    found = []
    cases = itertools.product((2, 4), (1.0, 0.0, 2.0, -1.0), (False, True, "never"))
    for index, (width, penalty, early) in enumerate(cases):
        prompt = token_ids[index : index + 3 + index % 5]
        options = {"num_beams": width, "length_penalty": penalty, "early_stopping": early, "max_new_tokens": 12}
        model.generation_config.eos_token_id = [2]
        case = search(model, prompt, **options)
        if index % 2:  # the random model hardly ever ends an answer: what it likes to say is made to end it
            first, second = (beam["token_ids"] for beam in case["beams"][:2])
            model.generation_config.eos_token_id = sorted(
                {2, first[4 % len(first)], second[7 % len(second)], first[2 % len(first)]}
            )
            case = search(model, prompt, **options)
        found.append({**case, "eos_token_ids": list(model.generation_config.eos_token_id)})
    return found


def main() -> None:
    np.savez_compressed(DATA / "hf_processors.npz", allow_pickle=False, **make_processed())
    beams = {name: make_beams(name) for name in ("llama", "qwen3")}
    (DATA / "hf_beams.json").write_text(json.dumps(beams, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
