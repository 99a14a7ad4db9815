"""Programs that others wrote against OpenAI's API: lm-evaluation-harness and langchain's standard tests.

They need packages that are not among the tested ones, in an environment of their own:
pip install -e ".[test]" lm-eval tenacity tiktoken transformers langchain-openai langchain-tests; then
pytest -m clients -W default -o asyncio_mode=auto -o asyncio_default_test_loop_scope=session tests/test_server_clients.py
"""

import json
import math

import pytest
from served_model import FLAGS, TEMPLATE, write_served_model
from server_process import ServerProcess

pytestmark = pytest.mark.clients
lm_eval = pytest.importorskip("lm_eval")
tasks = pytest.importorskip("lm_eval.tasks")
langchain_openai = pytest.importorskip("langchain_openai")
langchain_tests = pytest.importorskip("langchain_tests.integration_tests")

QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " green", " loud"], "answer": 0},
    {"question": "Two and two are", "choices": [" four", " five", " né"], "answer": 0},
    {"question": "A dog has", "choices": [" wings", " four legs", " wheels"], "answer": 1},
]
TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
doc_to_choice: choices
generation_kwargs: {{until: ["\\n", "x"], max_gen_toks: 8}}
metric_list: [{{metric: {metric}}}]
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return write_served_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def server(served, tmp_path_factory):
    with ServerProcess([str(served), *FLAGS], tmp_path_factory.mktemp("log") / "log") as made:
        yield made.wait_ready()


@pytest.fixture(scope="module")
def tokenizer(served):
    """As transformers reads it, from a folder without a template: lm-eval writes prompts of its own."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "Ā"}
    (served / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(served)


def evaluate(tmp_path, model, arguments, kind, target, metric, **options):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "tiny.yaml").write_text(TASK.format(file=rows, kind=kind, target=target, metric=metric))
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=["tiny"], task_manager=manager, bootstrap_iters=0, **options
    )
    print(json.dumps(found["results"], default=str))
    return found


@pytest.mark.filterwarnings("default")
def test_lm_eval_scores_choices(server, tokenizer, tmp_path):
    arguments = {"model": "tiny", "base_url": f"{server.url}/v1/completions", "tokenizer": tokenizer, "max_length": 512}
    found = evaluate(tmp_path, "local-completions", arguments, "multiple_choice", "answer", "acc")
    assert 0 <= found["results"]["tiny"]["acc,none"] <= 1
    samples = found["samples"]["tiny"]
    scores = [score for sample in samples for (score, _), *_ in sample["resps"]]
    assert len(scores) == 9
    assert all(math.isfinite(score) and score < 0 for score in scores)


@pytest.mark.filterwarnings("default")
def test_lm_eval_asks_in_chats(server, tmp_path):
    arguments = {"model": "tiny", "base_url": f"{server.url}/v1/chat/completions"}
    found = evaluate(
        tmp_path, "local-chat-completions", arguments, "generate_until", "answer", "exact_match", apply_chat_template=True
    )  # fmt: skip
    assert len(found["samples"]["tiny"]) == 3


@pytest.mark.filterwarnings("default")
class TestLangchain(langchain_tests.ChatModelIntegrationTests):
    """Its standard tests, but for those that need tools, structured output or pictures."""

    @pytest.fixture(autouse=True)
    def _at_server(self, server):
        type(self).url = server.url

    @property
    def chat_model_class(self):
        return langchain_openai.ChatOpenAI

    @property
    def chat_model_params(self):
        return {
            "model": "tiny",
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "max_tokens": 16,
            "stream_usage": True,
        }

    has_tool_calling = False
    has_tool_choice = False
    has_structured_output = False
    supports_json_mode = False
    supports_image_inputs = False
    returns_usage_metadata = True
