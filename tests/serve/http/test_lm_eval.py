"""lm-evaluation-harness against a real server, where it is installed, by the commands of docs/clients.md: what it calls
the likelihood of an answer is what the engine says of the same tokens, and the answers are the engine's."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny
from client_page import commands
from rounding import assert_within

from specserve import LLM, SamplingParams
from specserve.checkpoints.load import Target
from specserve.serve.http.app import create_app
from specserve.serve.http.transport.server import HttpServer

LM_EVAL = os.environ.get("LM_EVAL") or shutil.which("lm_eval")
ROWS = [
    {"q": 'def add(a, b):\n    """Return the', "choices": [" sum of a and b.", " zebra xylophone quark."], "gold": 0},
    {"q": 'class Reader:\n    """Read lines from a', "choices": [" purple mountain.", " file."], "gold": 1},
]
ASKED = {
    "choice": "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: gold\n"
    "metric_list: [{metric: acc}]",
    "until": "output_type: generate_until\ndoc_to_target: none\nmetric_list: [{metric: exact_match}]\n"
    'generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}',
}
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
doc_to_text: '{{{{q}}}}'
target_delimiter: ""
"""


@pytest.mark.slow
@pytest.mark.skipif(not LM_EVAL, reason="pip install 'lm-eval[api]', or name its command in LM_EVAL")
def test_likelihoods_and_answers_are_the_engines(tmp_path: Path, pydoc_target: Target) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, asked in ASKED.items():
        (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, rows=rows) + asked)
    by_completions, by_chat = commands("test_lm_eval")
    greedy = SamplingParams(temperature=0.0, max_tokens=12, stop=["\n"])
    with LLM(speculation="off", max_slots=2, max_model_len=256, progress=False) as llm:
        server = HttpServer(create_app(llm.engine), port=0)
        server.start()
        given = {"BASE_URL": f"{server.url}/v1", "MODEL": llm.engine.model_name}
        try:
            _evaluate(by_completions, tmp_path, given | {"TASKS": ",".join(ASKED), "OUT": "completions"})
            _evaluate(by_chat, tmp_path, given | {"TASKS": "until", "OUT": "chat"})
        finally:
            server.stop()
        for sample in _samples(tmp_path / "completions", "choice"):
            question, choices = sample["doc"]["q"], sample["doc"]["choices"]
            for choice, [[reported, _]] in zip(choices, sample["resps"], strict=True):
                token_ids, likelihoods = _likelihoods(llm, question, choice)
                # each is a logit less the logarithm of a sum of them, and both may be off by what a logit is
                bound = 2 * len(likelihoods) * tiny.tolerance(pydoc_target, token_ids).max()
                assert_within(float(reported), sum(likelihoods), bound)
            assert sample["acc"] == 1.0, "a document string ends like one"
        for out in ("completions", "chat"):
            for sample in _samples(tmp_path / out, "until"):
                question = sample["doc"]["q"]
                chat = llm.tokenizer.render_chat([{"role": "user", "content": question}])
                [answer] = llm.generate([chat if out == "chat" else question], greedy)
                assert sample["resps"] == [[answer.outputs[0].text]]


def _evaluate(command: str, folder: Path, given: dict[str, str]) -> None:
    """Run tasks of the folder. Their tokenizer is the server's own."""
    command = f"{command.rstrip()} --include_path . --log_samples --output_path $OUT"
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    path = {"PATH": f"{Path(str(LM_EVAL)).parent}{os.pathsep}{os.environ['PATH']}"}
    environment = os.environ | offline | given | path
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]


def _samples(folder: Path, task: str) -> list[dict]:
    [file] = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def _likelihoods(llm: LLM, question: str, answer: str) -> tuple[list[int], list[float]]:
    """The tokens of both, and the log-probabilities of the answer's tokens after the question's."""
    token_ids = llm.tokenizer.encode(question + answer)
    [result] = llm.generate([token_ids], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    num_asked = len(llm.tokenizer.encode(question))
    reported = [token.logprobs.logprob for token in (result.prompt_logprobs or ())[num_asked:] if token.logprobs]
    assert len(reported) == len(token_ids) - num_asked
    return token_ids, reported
