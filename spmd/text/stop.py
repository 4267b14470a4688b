"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Passes text through until one of `stops` is complete in it.

    The stop that is complete first wins; of several that end at the same character, the longest. Only text
    that may still turn out to be the start of a stop is held back. The stop itself is shown only with
    `include_in_output`; text after it never is.
    """

    def __init__(self, stops: Iterable[str] = (), include_in_output: bool = False) -> None:
        """`stops` are non-empty strings, as `SamplingParams.validate` ensures; without any, all is shown."""
        self._stops = tuple(dict.fromkeys(stops))
        if not all(self._stops):
            raise ValueError("a stop string is empty")
        self._include_in_output = include_in_output
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, None so far."""
        return self._matched

    def push(self, delta: str) -> str:
        """Take the next piece of text and return what can be shown now."""
        if self._matched is not None or not delta:
            return ""
        if not self._stops:
            return delta
        text = self._held + delta
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, self._matched = min(found)
            self._held = ""
            return text[: end if self._include_in_output else start]
        keep = self._held_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text held back, when nothing follows."""
        text, self._held = self._held, ""
        return text

    def _held_length(self, text: str) -> int:
        """Length of the longest end of `text` that starts one of the stops."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        return next(
            (
                n
                for n in range(longest, 0, -1)
                if any(s.startswith(text[len(text) - n :]) for s in self._stops)
            ),
            0,
        )
