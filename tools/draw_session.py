"""Ask `specserve serve` one question twice, with speculation off and on, and show which tokens of the answer were draft
tokens. The picture in the README is what this printed. Run it from the checkout:

    python tools/draw_session.py [--target ./smollm2] [--svg docs/pictures/session.svg]

Each streamed chunk is one decoding step: the accepted draft tokens, then the bonus token, which is the target's own.
"""

import argparse
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.text import Text

from specserve import host

SERVE = "specserve serve --target {} --speculation chain:3 --max-slots 1 --no-early-ready --port 0"
QUESTION = "Write a Python function that returns the n-th Fibonacci number."
TEMPERATURE, SEED, MAX_TOKENS = 0.7, 6, 160
Steps = list[list[str]]  # the texts of the tokens that each forward of the target emitted, the prompt's forward first


@contextmanager
def serving(console: Console, target: str) -> Iterator[str]:
    """Run the server for as long as the block lasts; the block gets the address that the server printed."""
    command = SERVE.format(shlex.quote(target))
    console.print(f"$ {command}", style="bold")
    is_wide = {**os.environ, "COLUMNS": "200"}  # its output is one line then
    with subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, text=True, env=is_wide) as server:
        assert server.stdout is not None
        try:
            for said in server.stdout:
                if address := re.search(r"http://\S+/v1", said):
                    console.print(said.strip())
                    yield address[0]
                    break
            else:
                raise SystemExit(f"{command}: it ended without printing an address")
        finally:
            server.terminate()


def ask(client: OpenAI, speculation: int | str) -> tuple[Steps, int]:
    """The answer by steps, and how many of its tokens were draft tokens. `speculation` is the field of the request."""
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=TEMPERATURE,
        seed=SEED,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,  # they name the tokens of a chunk
        extra_body={"speculation": speculation},
    )
    steps, num_accepted = [], 0
    for chunk in stream:
        if chunk.usage is not None and chunk.usage.completion_tokens_details is not None:
            num_accepted = chunk.usage.completion_tokens_details.accepted_prediction_tokens or 0
        for choice in chunk.choices:
            if choice.logprobs is not None and choice.logprobs.content:
                steps.append([token.token for token in choice.logprobs.content])
    return steps, num_accepted


def show(console: Console, name: str, steps: Steps, num_accepted: int) -> None:
    num_tokens = sum(len(step) for step in steps)
    console.print(f"\n{name}: {num_tokens} tokens, {len(steps)} forwards of the target", style="bold")
    answer = Text()
    for step in steps[:-1]:
        answer.append("".join(step[:-1]), style="bold green").append(step[-1])
    num_last = num_accepted - sum(len(step) - 1 for step in steps[:-1])  # an answer may end with a draft token
    answer.append("".join(steps[-1][:num_last]), style="bold green").append("".join(steps[-1][num_last:]))
    console.print(answer)


def machine() -> str:
    """The processor as the system names it, and the cores that this process may use."""
    named = re.search(r"model name\s*: ([^;]*)", host.processor())
    return f"{named[1] if named else host.processor()}, {host.num_cores()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, help="draw what was printed into this file")
    parser.add_argument("--target", default="smollm2-135m", help="preset, folder or hub id, served with its own head")
    options = parser.parse_args()
    svg: Path | None = options.svg
    console = Console(record=True, width=104, highlight=False)
    with serving(console, options.target) as address, OpenAI(base_url=address, api_key="unused") as client:
        console.print(f"\n$ python tools/draw_session.py --target {options.target}", style="bold")
        console.print(f"> {QUESTION}")
        plain, _ = ask(client, "off")
        drafted, num_accepted = ask(client, "auto")
    show(console, "plain", plain, 0)
    show(console, "speculative, draft tokens in green", drafted, num_accepted)
    is_same = list(chain.from_iterable(plain)) == list(chain.from_iterable(drafted))
    tau = (sum(map(len, drafted)) - 1) / (len(drafted) - 1)  # the first forward is the prompt's, of one token
    console.print(
        f"\ntemperature {TEMPERATURE}, seed {SEED}: {'the same' if is_same else 'DIFFERENT'} tokens, "
        f"tau {tau:.2f} (tokens for each forward after the prompt's)",
        style="bold",
    )
    if svg is not None:
        console.save_svg(str(svg), title=f"specserve on {machine()}")


if __name__ == "__main__":
    main()
