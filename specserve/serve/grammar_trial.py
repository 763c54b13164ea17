"""Compiles the grammars that clients send, and tries each in a process of its own before.

A short grammar can ask for hours of work, for all memory, or for more stack than a thread has; and a call of the parser
cannot be stopped. So another process compiles it first, under limits that the system keeps. What it does not survive is
refused. That process runs this file as a program, so nothing of the package is imported here.
"""

import json
import math
import os
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

CPU_SECONDS = 2  # that one grammar may take: the system counts whole ones
MEMORY_BYTES = 2**29  # address space, beside the tokenizer's
STACK_BYTES = 3 * 2**19  # less than the 2 MiB that threads have at least, of which some compile it afterwards
_WHITESPACE = r"[ \n\r\t]{1,20}"  # between the parts of JSON: room to indent, and no answer of nothing but spaces


def words(tokenizer: str, vocab_size: int, eos_ids: Sequence[int]) -> Any:
    """A tokenizer.json's text as llguidance takes it. Raises ValueError."""
    import llguidance  # when the first grammar comes: a server that meets none does not hold it

    return llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids))


def compiled(tokenizer: Any, kind: str, text: str) -> Any:
    """The matcher of a grammar of a kind of `GrammarSpec`, at its start. Raises ValueError with the parser's own
    words."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, _grammar(kind, text), log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    if not any(matcher.compute_bitmask()):
        raise ValueError("no answer follows it")
    return matcher


def _grammar(kind: str, text: str) -> str:
    from llguidance import LLMatcher

    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": _WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
        case _ if "::=" in text:  # GBNF, as llama.cpp and xgrammar write it
            return LLMatcher.grammar_from_lark(_from_gbnf(text))
        case _:
            return LLMatcher.grammar_from_lark(text)


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # its parser raises what it likes
        raise ValueError(str(error)) from error


class GrammarTrial:
    """The other process, for one tokenizer. It is started anew after a grammar that it did not survive, and ends with
    this process. Threads may share it."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._words = tokenizer, vocab_size, list(eos_ids)
        self._lock = threading.Lock()
        self._start()

    def check(self, kind: str, text: str) -> str:
        """Return why a grammar cannot be used, or nothing where it can. Raises RuntimeError where the process cannot
        be started."""
        with self._lock:
            if not self._is_ready:
                self._is_ready = self._ask(None) is not None
            if not self._is_ready:
                raise RuntimeError("the process that tries grammars did not start")
            error = self._ask([kind, text])
            if error is not None:
                return error
            self._end()
            self._start()
        return (
            f"compiling it takes more than {CPU_SECONDS} s, {MEMORY_BYTES / 2**20:g} MiB or a stack of "
            f"{STACK_BYTES / 2**20:g} MiB; make it smaller: with fewer alternatives, repetitions, rules and patterns"
        )

    def _start(self) -> None:
        command = [sys.executable, "-P", __file__]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)  # Ctrl-C is not its own
        self._end = weakref.finalize(self, self._process.communicate)
        self._is_ready = False

    def _ask(self, question: list[str] | None) -> str | None:
        """Return what the process answers, or None where it has died. None asks whether it has read the tokenizer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(self._words if question is None else question) + "\n")
            stdin.flush()
        except BrokenPipeError:
            return None
        told = stdout.readline()
        return json.loads(told) if told else None


def _serve() -> None:
    """Read a tokenizer, then grammars, a line each, and tell what is wrong with each of them, until there are no
    more."""
    tokenizer = words(*json.loads(sys.stdin.readline()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, _address_space() + MEMORY_BYTES)
    error = ""
    while True:
        sys.stdout.write(json.dumps(error) + "\n")
        sys.stdout.flush()
        if not (line := sys.stdin.readline()):
            break
        _limit(resource.RLIMIT_CPU, math.ceil(sum(os.times()[:2])) + CPU_SECONDS)
        try:
            compiled(tokenizer, *json.loads(line))
            error = ""
        except ValueError as wrong:
            error = str(wrong)


def _limit(what: int, amount: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def _address_space() -> int:
    """Bytes. Where the system does not tell, there is no bound on memory, but for that of the time."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**62


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
