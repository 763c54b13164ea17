"""Offline batches in one process, under vLLM's names: `LLM(...).generate(prompts, params)`.

Owns the models and a running engine, and knows no HTTP and no event loop, so it works alike in a script and a notebook.
"""

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from specserve import config, host
from specserve.checkpoints.tensors import head_beside
from specserve.errors import CapacityError, ConfigError, RequestError
from specserve.serve.engine.rest import PauseMode, SleepMode
from specserve.serve.engine.rounds import PARTS, Part
from specserve.serve.engine.swap import DraftWeights, TargetWeights, UpdateMode
from specserve.serve.engines import load
from specserve.serve.launch import make_engine
from specserve.serve.progress import answer_bar, warmup_bar
from specserve.serve.requests.completion import CompletionOutput
from specserve.serve.requests.request import PromptToken, SamplingParams
from specserve.serve.settings import ENGINE, PROGRAM, EngineSettings, ServeRun
from specserve.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Message = Mapping[str, Any]


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers."""

    prompt: str | None  # None where token ids were given
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]

    @property
    def prompt_logprobs(self) -> tuple[PromptToken, ...] | None:
        """The log-probabilities of the prompt's tokens, where `SamplingParams(prompt_logprobs=...)` asked for them."""
        return self.outputs[0].prompt or None


class LLM:
    """A target, perhaps with a draft head, ready to answer. It is a context manager; `close` frees the engine's
    thread.

    `target` is a preset, a Hugging Face folder, a GGUF file or a hub id, `draft` the folder of a head; without either
    it is the bundled pair. `settings` are those of `specserve serve` that concern programs or the engine.
    `tokenizer=None` serves folders that have none, by token ids alone. `progress` shows bars while
    programs compile and answers are made. Raises ConfigError or CheckpointError.
    """

    def __init__(
        self,
        target: str | Path = "",
        draft: str | Path = "",
        *,
        speculation: str = "auto",
        tokenizer: bool | None = True,
        progress: bool = True,
        **settings: Unpack[EngineSettings],
    ) -> None:
        given = {
            "target": str(target),
            "draft": str(draft),
            "speculation": speculation,
            "constrained": False,
            "early_ready": False,
            **settings,
        }
        of_server = {leaf.name for leaf in config.leaves(ServeRun) if leaf.scope not in (PROGRAM, ENGINE)}
        if foreign := sorted(of_server.intersection(settings)):
            raise ConfigError(f"{', '.join(foreign)}: a setting of the HTTP server; LLM listens to nobody")
        run = config.resolve(ServeRun, arguments=given)
        host.keep_freed_memory()
        models = load(run, run.draft, has_tokenizer=bool(tokenizer), is_checked=run.check_weights)
        with warmup_bar(is_shown=progress) as on_warmup:
            self.engine = make_engine(models, run, on_warmup)
        del models  # the engine has packed what it needs of them
        self._progress = progress
        self._stop = weakref.finalize(self, self.engine.stop)  # at the end of the process as well
        self.engine.start()

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError where there is none."""
        return self.engine.tokenizer

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine. Answers that are not finished end as cancelled. It may be called again."""
        self._stop()

    def update_weights(
        self,
        target: TargetWeights | None = None,
        draft: DraftWeights | None = None,
        *,
        version: str = "",
        mode: UpdateMode = "continue",
    ) -> str:
        """Answer by another version of the weights from now on. `target` is `TargetParams` (as `load_target` gives
        them), arrays by the checkpoint's names, a model folder, or one file of safetensors; `draft` the parameters of
        the same head, a folder of one, or such a file, in which the head's names begin with `draft.`. Each may be left
        out, and then stays. Arrays that are where they are needed are not copied, so do not donate them. Answers that
        are being made in another thread `continue`, with their keys and values computed anew, or, to `drain`, end
        first. Returns the version's name: `version`, or a number. Raises ConfigError or CheckpointError where anything
        is wrong with it; then nothing has changed."""
        return self.engine.update_weights(
            target, draft if draft is not None else head_beside(target), version=version, mode=mode
        )

    def pause(self, mode: PauseMode = "abort") -> None:
        """Make no more steps until `resume`. Answers that are being made in other threads end as they are (`abort`),
        end first (`wait`), or go on later: as they are (`keep`), or with their keys and values computed anew
        (`retract`). Raises ConfigError."""
        self.engine.pause(mode)

    def resume(self) -> None:
        """End a pause. Raises ConfigError while something is off the device."""
        self.engine.resume()

    def sleep(self, level: int = 1, *, parts: Collection[Part] = PARTS, mode: SleepMode = "retract") -> None:
        """Take the `weights`, the `kv_cache`, or both off the device, and make no more steps until `wake`; `mode` is as
        of `pause`. `level` is vLLM's, 1 or 2: the host keeps a copy of the weights at either. Raises ConfigError."""
        if level not in (1, 2):
            raise ConfigError(f"sleep: level {level!r}: expected 1 or 2; give parts for what is to leave the device")
        self.engine.sleep(parts, mode)

    def wake(self, parts: Collection[Part] = PARTS) -> None:
        """Bring these parts back to the device. When all are there, answers go on, unless there is a pause too. Raises
        ConfigError where the device has no room for one, which may be asked for again."""
        self.engine.wake(parts)

    def wake_up(self, tags: Collection[Part] | None = None) -> None:
        """Bring parts back to the device: `wake` under vLLM's name."""
        self.wake(PARTS if tags is None else tags)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, those of answers that are being made too. An update of the weights does so."""
        self.engine.flush_cache()

    def load_lora(self, name: str, folder: str | Path) -> None:
        """Load the LoRA adapter in a PEFT folder under a name by which `lora` finds it. There is room for `max_loras`
        adapters, of `max_lora_rank` at most. Raises ConfigError or CheckpointError where anything is wrong with it;
        then nothing has changed."""
        self.engine.load_lora(name, str(folder))

    def unload_lora(self, name: str) -> None:
        """Let no more answers find a LoRA adapter; those that are being made go on. Raises ConfigError where there is
        none of that name."""
        self.engine.unload_lora(name)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many and wait; results in order. A prompt is a text, token ids, `{"prompt": text}` or
        `{"prompt_token_ids": [...]}`; `params` are those of all prompts, or one for each. `lora` names the LoRA adapter
        that answers; empty: the target alone.

        Every prompt is checked before any is run: RequestError names the first that cannot be run. An answer that
        fails later has finish_reason "error". An interrupt (Ctrl-C) cancels what is running, and the next call works.
        """
        every = [prompts] if _is_single(prompts) else list(prompts)  # type: ignore[arg-type]
        asked = [_at(i, len(every), lambda prompt=prompt: self._read(prompt)) for i, prompt in enumerate(every)]
        return self._answer(asked, params, progress, lora)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, as `generate` does, by the target's chat template."""
        is_single = bool(messages) and isinstance(messages[0], Mapping)
        every: Sequence[Any] = [messages] if is_single else messages

        def render(chat: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
            if not chat or not all(isinstance(message, Mapping) for message in chat):
                raise RequestError('a conversation is a list of {"role", "content"}', param="messages")
            token_ids = self.tokenizer.render_chat(chat, template_kwargs=chat_template_kwargs)
            return self.tokenizer.decode(token_ids, skip_special_tokens=False), tuple(token_ids)

        asked = [_at(i, len(every), lambda chat=chat: render(chat)) for i, chat in enumerate(every)]
        return self._answer(asked, params, progress, lora)

    def _read(self, prompt: Any) -> tuple[str | None, tuple[int, ...]]:
        """Return the text of a prompt, where there is one, and its token ids."""
        if isinstance(prompt, Mapping):
            if prompt.keys() not in ({"prompt"}, {"prompt_token_ids"}):
                raise RequestError(
                    f'expected {{"prompt"}} or {{"prompt_token_ids"}}, got {sorted(prompt)}', param="prompt"
                )
            (prompt,) = prompt.values()
        if isinstance(prompt, str):
            return prompt, tuple(self.tokenizer.encode(prompt))
        return None, _token_ids(prompt)

    def _answer(
        self,
        asked: Sequence[tuple[str | None, tuple[int, ...]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        lora: str,
    ) -> list[RequestOutput]:
        if not self._stop.alive:
            raise CapacityError("this LLM is closed; make another one")
        each = (
            [params or SamplingParams()] * len(asked)
            if params is None or isinstance(params, SamplingParams)
            else params
        )
        if len(each) != len(asked):
            raise RequestError(f"{len(each)} sampling params for {len(asked)} prompts; give one, or one for each")
        choices = [own.choices() for own in each]
        for i, ((_, token_ids), own) in enumerate(zip(asked, choices, strict=True)):
            _at(i, len(asked), lambda ids=token_ids, own=own: self.engine.inputs.check(ids, own[0]))
        prompts = [ids for (_, ids), own in zip(asked, choices, strict=True) for _ in own]
        flat = [choice for own in choices for choice in own]
        with answer_bar(len(flat), is_shown=self._progress if progress is None else progress) as on_done:
            found = iter(self.engine.generate(prompts, flat, lambda _i, completion: on_done(completion), lora=lora))
        outputs = []
        for (text, ids), own in zip(asked, each, strict=True):
            has_logprobs = own.logprobs is not None
            answers = [
                dataclasses.replace(answer, index=i, logprobs=answer.logprobs if has_logprobs else None)
                for i, answer in enumerate(itertools.islice(found, own.n))
            ]
            outputs.append(RequestOutput(text, ids, answers))
        return outputs


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    if not isinstance(prompts, Sequence) and not hasattr(prompts, "__array__"):
        raise RequestError(f"expected a prompt or a list of prompts, got {type(prompts).__name__}", param="prompt")
    return len(prompts) > 0 and hasattr(prompts[0], "__index__") and not isinstance(prompts[0], str)


def _token_ids(prompt: Any) -> tuple[int, ...]:
    try:
        if any(isinstance(token_id, bool) for token_id in prompt):
            raise TypeError
        return tuple(operator.index(token_id) for token_id in prompt)
    except TypeError:
        raise RequestError("a prompt is a text or a list of token ids", param="prompt") from None


def _at(i: int, total: int, call: Any) -> Any:
    """Return the call's result. Its RequestError says which prompt it was."""
    try:
        return call()
    except RequestError as error:
        if total == 1:
            raise
        raise RequestError(f"prompt {i} of {total}: {error}", param=error.param) from None
