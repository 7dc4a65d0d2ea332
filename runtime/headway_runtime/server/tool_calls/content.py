"""The content around tool calls: white space next to a call is not part of it."""


class Content:
    """Holds white space back until it is known what follows it."""

    __slots__ = ("_is_after_call", "_white_space")

    def __init__(self) -> None:
        self._white_space = ""
        self._is_after_call = False

    def push(self, text: str) -> str:
        """What of the content so far is certain."""
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        body = text.rstrip()
        if not body:
            self._white_space += text
            return ""
        out = self._white_space + body
        self._white_space = text[len(body) :]
        return out

    def call(self) -> None:
        """A call begins here."""
        self._white_space = ""
        self._is_after_call = True

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        out, self._white_space = self._white_space, ""
        return out
