"""Compiles the grammars that clients send, and tries each in a process of its own before.

A short grammar can ask for hours of work, for all memory, or for more stack than a thread has; and a call of the parser
cannot be stopped. So another process compiles it first, under limits that the system keeps. What it does not survive is
refused. That process runs this file as a program, so nothing of the package is imported here.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from typing import Any

CPU_SECONDS = 2  # bytes that one grammar may take: the system counts whole ones
MEMORY_BYTES = 2**29  # address space, beside the tokenizer's
STACK_BYTES = 3 * 2**19  # less than the 2 MiB that threads have at least, of which some compile it afterwards
ANSWER_SECONDS = 30.0  # by the clock, in which a process must start, or answer: also one that sleeps is ended
_NO_MEMORY = 3  # the exit status of a process that has met Python's MemoryError
_OF_LIMITS = {_NO_MEMORY, *(-number for number in (signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT))}
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
    """The other process, for one tokenizer. It starts with the first grammar, anew after one that it did not survive,
    and ends with this process. Threads may share it."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._words = tokenizer, vocab_size, list(eos_ids)
        self._lock = threading.Lock()
        self._process: _Process | None = None  # one that waits for grammars

    def check(self, kind: str, text: str) -> str:
        """Return why a grammar cannot be used, or nothing where it can. A process that ends otherwise than by the
        limits says nothing of the grammar, so another one tries it. Raises OSError where that ends too, or where none
        can be started."""
        ends = []
        with self._lock:
            while len(ends) < 2:
                process, self._process = self._process or _Process(self._words), None
                error = process.ask([kind, text]) if process.is_ready else None
                if error is not None:
                    self._process = process
                    return error
                if process.has_met_limits():
                    return (
                        f"compiling it takes more than {CPU_SECONDS} s, {MEMORY_BYTES / 2**20:g} MiB or a stack of "
                        f"{STACK_BYTES / 2**20:g} MiB; make it smaller: with fewer alternatives, repetitions, rules "
                        "and patterns"
                    )
                ends.append(process.end())
        raise ChildProcessError(f"the processes for that have ended ({'; '.join(ends)})")


class _Process:
    """A process that has read a tokenizer and is asked about grammars."""

    def __init__(self, tokenizer: Sequence[Any]) -> None:
        """Start it. Raises OSError where the system has no room for it."""
        command = [sys.executable, "-P", __file__]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._process = subprocess.Popen(command, encoding="utf-8", errors="replace", start_new_session=True, **pipes)
        self._end = weakref.finalize(self, _end, self._process)
        self._is_late = False
        self.is_ready = self.ask(tokenizer) is not None

    def ask(self, question: Sequence[Any]) -> str | None:
        """Return what the process answers, or None where it has died, at the latest when the time is over."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        timer = threading.Timer(ANSWER_SECONDS, self._give_up)
        timer.daemon = True
        timer.start()
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
            line = stdout.readline()
            if line.endswith("\n"):
                return json.loads(line)
            self._process.wait()
        except BrokenPipeError:
            self._process.wait()
        finally:
            timer.cancel()
        return None

    def has_met_limits(self) -> bool:
        """Return whether the limits have ended a process that was asked about a grammar."""
        return self.is_ready and self._process.returncode in _OF_LIMITS

    def end(self) -> str:
        """Forget a process that has died. Returns how it ended: its exit status and the last line of its stderr."""
        status, said = self._process.returncode, (self._end() or "").strip().rpartition("\n")[2]
        if self._is_late:
            how = f"no answer within {ANSWER_SECONDS:g} s"
        else:
            how = f"exit status {status}" if status >= 0 else f"signal {-status} ({signal.strsignal(-status)})"
        return how + (f", {said[:300]}" if said else "")

    def _give_up(self) -> None:
        self._is_late = True
        self._process.kill()


def _end(process: subprocess.Popen[str]) -> str:
    process.kill()
    return process.communicate()[1]


def _serve() -> None:
    """Read a tokenizer, then grammars, a line each, and report what is wrong with each of them, until there are no
    more."""
    tokenizer = words(*json.loads(sys.stdin.readline()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, _address_space() + MEMORY_BYTES)
    error = ""
    while True:
        _limit(resource.RLIMIT_CPU, math.ceil(sum(os.times()[:2])) + CPU_SECONDS)
        sys.stdout.write(json.dumps(error) + "\n")
        sys.stdout.flush()
        if not (line := sys.stdin.readline()):
            break
        try:
            compiled(tokenizer, *json.loads(line))
            error = ""
        except ValueError as wrong:
            error = str(wrong)


def _run() -> None:
    """Serve, and end with a status that says how it went."""
    try:
        _serve()
        status = 0
    except MemoryError:
        status = _NO_MEMORY
    except BaseException:  # a panic of the parser's is no Exception
        traceback.print_exc()
        status = 1
    os._exit(status)


def _limit(what: int, amount: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def _address_space() -> int:
    """Bytes. Where the system does not report it, there is no bound on memory, but for that of the time."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 2**62


if __name__ == "__main__":
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # a signal that stops a server may reach all its processes; it ends with stdin
        signal.signal(number, signal.SIG_IGN)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_run)
    thread.start()
    thread.join()
