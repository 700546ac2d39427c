"""From tokens to text as it comes: no half characters, and nothing behind a stop text."""

from collections.abc import Callable, Sequence

CONTEXT_TOKENS = 5
"""Tokens of the prompt that the first output token is decoded with: some tokenizers join them with a space."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes one request's output, token by token.

    Args:
        decode: token ids → text.
        prompt: the prompt's tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._start, self._told = 0, len(self._ids)

    def push(self, token: int) -> str:
        """Add a token; the text that is certain now."""
        self._ids.append(token)
        text = self._untold()
        if text.endswith(REPLACEMENT):  # a character whose other bytes are in the tokens to come
            return ""
        self._start, self._told = self._told, len(self._ids)
        return text

    def end(self) -> str:
        """The text that is left, complete or not."""
        text = self._untold()
        self._start = self._told = len(self._ids)
        return text

    def _untold(self) -> str:
        before = self._decode(self._ids[self._start : self._told])
        return self._decode(self._ids[self._start :])[len(before) :]


class StopTexts:
    """Holds text back as long as it may be the beginning of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text; what may be shown now. After ``found`` there is nothing more."""
        if self.found:
            return ""
        self._held += text
        starts = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if starts:
            self.found = True
            shown, self._held = self._held[: min(starts)], ""
            return shown
        cut = len(self._held) - self._longest_beginning()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def end(self) -> str:
        """What was held back, since nothing more comes."""
        shown, self._held = self._held, ""
        return shown

    def _longest_beginning(self) -> int:
        """Length of the longest end of the held text that a stop text begins with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
