"""Training data in the target's own words: every question of a data set, answered by the target through the engine.

A head learns to predict what the target says, not what a data set's authors wrote, so this is the largest quality
lever there is (docs/log)."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from specserve.data.conversations import Conversation
from specserve.errors import DataError, RequestError
from specserve.serve.completion import Completion
from specserve.serve.engine import Engine
from specserve.serve.request import SamplingParams


def regenerate(
    engine: Engine,
    conversations: Sequence[Conversation],
    output: Path,
    params: SamplingParams,
    on_done: Callable[[int], None] = lambda _num_tokens: None,
) -> int:
    """Append one `{"id", "messages"}` row per conversation to `output`, in order of completion. Rows that are there
    already are not made again, so an interrupted run goes on where it stopped. Returns the number of rows written.

    Only the first question of a conversation is asked. Conversations without one, or whose question does not fit,
    raise DataError before anything is generated.
    """
    done = _ids(output)
    prompts: list[list[int]] = []
    rows: list[tuple[int, list[dict[str, str]]]] = []
    for i, conversation in enumerate(conversations):
        question = [message for message in conversation.as_dicts() if message["role"] != "assistant"]
        if conversation.is_document or not question:
            raise DataError(f"conversation {i} of {conversation.source} asks nothing; regenerate needs questions")
        question = question[: 1 + (question[0]["role"] == "system")]
        if i not in done:
            try:
                prompts.append(engine.tokenizer.render_chat(question))
            except RequestError as error:
                raise DataError(f"conversation {i} of {conversation.source}: {error}") from error
            rows.append((i, question))
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a") as file:

        def write(i: int, completion: Completion) -> None:
            number, question = rows[i]
            answer = {"role": "assistant", "content": completion.text}
            file.write(json.dumps({"id": number, "messages": [*question, answer]}) + "\n")
            file.flush()
            on_done(len(completion.token_ids))

        engine.generate(prompts, params, write)
    return len(rows)


def _ids(output: Path) -> set[int]:
    """The conversations that are answered already. A half-written last line (a killed run) is dropped."""
    if not output.is_file():
        return set()
    whole = [line for line in output.read_text().splitlines(keepends=True) if line.endswith("\n")]
    output.write_text("".join(whole))
    return {json.loads(line)["id"] for line in whole}
