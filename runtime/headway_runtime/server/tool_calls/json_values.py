"""Where a JSON value ends, in a text that arrives in pieces.

Follows strings and brackets only: what stands between them is its reader's to check. So it neither fails nor
goes back, and looks at each character once.
"""

import re

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\],]')
WHITE_SPACE = " \t\r\n"


class ValueEnd:
    """Follows one value from its first character on. Brackets count, but not of which kind they are."""

    __slots__ = ("_depth", "_in_string", "_is_escaped", "is_at_end")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_at_end = False

    def push(self, text: str, start: int) -> int:
        """How far in `text` the value goes, from `start` on; sets is_at_end if it ends there.

        A number or a word ends before the comma or bracket that follows it.
        """
        position = start
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, position)
            if found is None:
                return len(text)
            position = found.end()
            character = found[0]
            if self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
                if not self._in_string and self._depth == 0:
                    self.is_at_end = True
                    return position
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif self._depth == 0:
                # What closes or continues the object around a number or a word.
                self.is_at_end = True
                return found.start()
            elif character != ",":
                self._depth -= 1
                if self._depth == 0:
                    self.is_at_end = True
                    return position
        return position
