"""Makes tests/data/gemma3_greedy.json: what Hugging Face transformers answers with the weights of gemma3-270m.

    PYTHON scripts/make_gemma_golden.py MODEL.gguf [--tokens 32]

PYTHON is that of an environment with torch, transformers and gguf; MODEL.gguf is what `jaxllm pull gemma3-270m`
prints. transformers dequantises the file itself, so both engines compute with the same float32 weights. Several
minutes on a CPU, most of them for reading the file.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parents[1] / "tests" / "data" / "gemma3_greedy.json"

# The file has no chat template, as it is a base model; the turns are written as Gemma's template would.
TURNS = "<start_of_turn>user\nName three colours.<end_of_turn>\n<start_of_turn>model\n"
# Longer than the window of 512 tokens that most layers have.
LONG = " ".join(f"The number after {number} is {number + 1}." for number in range(60)) + " The number after 60 is"
PROMPTS = ("The capital of France is", "Die Hauptstadt von Österreich ist", "def add(a, b):\n    ", TURNS, LONG)
DIGITS = 5


def answer(model: Any, tokenizer: Any, prompt: str, max_tokens: int) -> dict[str, Any]:
    """The greedy continuation, with the log-probability of each token and its lead over the second best."""
    torch = importlib.import_module("torch")
    prompt_ids = tokenizer(prompt)["input_ids"]
    tokens, logprobs, gaps = [], [], []
    inputs, cache = torch.tensor([prompt_ids]), None
    while len(tokens) < max_tokens and model.config.eos_token_id not in tokens:
        with torch.inference_mode():
            output = model(inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best, second = torch.log_softmax(output.logits[0, -1].double(), -1).topk(2)[0].tolist()
        inputs = output.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(inputs.item())
        logprobs.append(round(best, DIGITS))
        gaps.append(round(best - second, DIGITS))
    text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    return {
        "prompt": prompt,
        "prompt_ids": prompt_ids,
        "gen": tokens,
        "text": text,
        "logprobs": logprobs,
        "top2_gap": gaps,
    }


def note() -> str:
    versions = {name: importlib.import_module(name).__version__ for name in ("transformers", "torch")}
    return (
        "Greedy continuations of Gemma 3 270M (Q4_K_M GGUF dequantised to float32), computed in float32 with Hugging "
        f"Face transformers {versions['transformers']} and torch {versions['torch']} on a CPU by "
        "scripts/make_gemma_golden.py. top2_gap is the log-probability gap between the best and the second token: "
        "where it is small another order of float32 sums may flip the token."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_file", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    folder, file = arguments.model_file.parent, arguments.model_file.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    cases = [answer(model, tokenizer, prompt, arguments.tokens) for prompt in PROMPTS]
    content = {"note": note(), "model": file, "cases": cases}
    OUTPUT.write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    for case in cases:
        print(repr(case["prompt"][-60:]), "->", repr(case["text"]), "smallest gap", min(case["top2_gap"]))


if __name__ == "__main__":
    main()
