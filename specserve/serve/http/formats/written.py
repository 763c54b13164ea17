"""Values as models write them where they write no JSON: Python's literals, calls with named arguments as in Python, and
Gemma's objects with keys and texts in its own quotes. JSON is read too."""

import ast
import json
import math
import re
from typing import Any

GEMMA_QUOTE = '<|"|>'
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[^\s,:=\[\](){}\"']+")
# A quote within a text may come without its backslash, as templates that put texts between quotes show it. So a quote
# ends a text only before what may follow a value.
_AFTER = r"(?=\s*(?:[,:)\]}]|$))"
_QUOTED = re.compile("|".join(rf"{q}(?:[^{q}\\]|\\.|{q}(?!{_AFTER}))*{q}{_AFTER}" for q in "\"'"), re.DOTALL)
_CLOSING = {"{": "}", "[": "]", "(": ")"}


def read_value(text: str) -> Any:
    """Read a value, as JSON or as one of the other notations has it. Raises ValueError for any other text, and for
    numbers that JSON has not."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError:
        pass
    written = _Written(text)
    value = written.value()
    written.expect_end()
    return value


def read_calls(text: str) -> list[tuple[str, list[Any], dict[str, Any]]]:
    """Read calls such as `[f(a=1), g("x")]`, one of them also without its list: the name of each, and its arguments
    without and with a name. Raises ValueError."""
    written = _Written(text.strip().removesuffix(","))
    calls = written.items("]", written.call) if written.takes("[") else [written.call()]
    written.expect_end()
    return calls


def _refuse(constant: str) -> Any:
    raise ValueError(f"JSON has no {constant}")


class _Written:
    """A text that is read from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def takes(self, mark: str) -> bool:
        """Take the mark, behind space, where it stands next."""
        self._match(_SPACE)
        is_next = self._text.startswith(mark, self._at)
        self._at += len(mark) * is_next
        return is_next

    def expect(self, mark: str) -> None:
        if not self.takes(mark):
            raise ValueError(f"expected {mark} at character {self._at}")

    def expect_end(self) -> None:
        self._match(_SPACE)
        if self._at < len(self._text):
            raise ValueError(f"expected nothing more at character {self._at}")

    def value(self) -> Any:
        for begin, end in _CLOSING.items():
            if self.takes(begin):
                self._depth += 1
                if self._depth > 100:
                    raise ValueError("it is nested too deeply")
                found = self.items(end, self._member if begin == "{" else self.value)
                self._depth -= 1
                return dict(found) if begin == "{" else found
        text = self._quoted()
        return self._scalar() if text is None else text

    def items(self, end: str, read: Any) -> list[Any]:
        """Read what stands before this bracket, between commas."""
        found: list[Any] = []
        while not self.takes(end):
            if found:
                self.expect(",")
                if self.takes(end):
                    break
            found.append(read())
        return found

    def call(self) -> tuple[str, list[Any], dict[str, Any]]:
        name = self._word()
        self.expect("(")
        arguments = self.items(")", self._argument)
        return name, [value for key, value in arguments if key is None], {k: v for k, v in arguments if k is not None}

    def _argument(self) -> tuple[str | None, Any]:
        start = self._at
        if (word := self._match(_WORD)) and self.takes("="):
            return word, self.value()
        self._at = start
        return None, self.value()

    def _member(self) -> tuple[str, Any]:
        key = self._quoted()
        key = self._word() if key is None else key
        self.expect(":")
        return key, self.value()

    def _quoted(self) -> str | None:
        """Take a text in quotes. None where none stands next."""
        if self.takes(GEMMA_QUOTE):
            text, quote, _ = self._text[self._at :].partition(GEMMA_QUOTE)
            self._at += len(text) + len(quote)
            if not quote:
                raise ValueError("a text does not end")
            return text
        self._match(_SPACE)
        if not (quoted := self._match(_QUOTED)):
            return None
        try:
            return json.loads(quoted, strict=False)
        except ValueError:
            quote, inner = quoted[0], quoted[1:-1].replace("\n", "\\n").replace("\r", "\\r")
            inner = re.sub(r"(\\.)|" + quote, lambda found: found[1] or "\\" + quote, inner)
            return str(ast.literal_eval(quote + inner + quote))

    def _scalar(self) -> Any:
        word = self._word()
        if word in _WORDS:
            return _WORDS[word]
        try:
            return int(word)
        except ValueError:
            number = float(word)
        if not math.isfinite(number):
            raise ValueError(f"JSON has no {word}")
        return number

    def _word(self) -> str:
        self._match(_SPACE)
        if not (word := self._match(_WORD)):
            raise ValueError(f"expected a word at character {self._at}")
        return word

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        taken = found[0] if found else ""
        self._at += len(taken)
        return taken
