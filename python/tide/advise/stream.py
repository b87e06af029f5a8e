"""Events of a chrome trace, one by one, in memory that does not grow with the file.

Reads what torch.profiler writes (an object with "traceEvents", plain or gzip) and bare lists of
events. A file that ends early gives the events before the end; an event that cannot be read is
skipped and counted. What is no trace at all raises `look.BadInput`.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from tide.look import BadInput

CHUNK_BYTES = 1 << 20  # of the file; unzipped it may be thirty times as much
ZLIB_GZIP = 31
GZIP = b"\x1f\x8b"
LARGEST_READ = 8 << 20  # bytes, of unzipped data at once
LARGEST_VALUE = 64 << 20  # characters; no event or header value is larger
LONGEST_GAP = 4096  # characters between two events
SPACE = re.compile(r"[\s,]*")
NEXT_EVENT = re.compile(r"[}\]]\s*,\s*(?=\{)")
Event = dict[str, Any]


class Trace:
    """One pass over one file. `header` holds the other top-level values that were met so far."""

    def __init__(self, path: Path, tick: Callable[[float], None] = lambda share: None) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.truncated = False
        self.broken = 0
        self._tick = tick
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self._text = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._buffer, self._at, self._ended = "", 0, False
        try:
            self._size = max(1, path.stat().st_size)
            self._raw: IO[bytes] = path.open("rb")
        except OSError as error:
            raise BadInput(f"{path} cannot be read: {error.strerror}") from None
        zipped = self._raw.read(2) == GZIP
        self._raw.seek(0)
        self._unzip = zlib.decompressobj(ZLIB_GZIP) if zipped else None
        self._zipped = b""  # read and not unzipped yet

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def events(self) -> Iterator[Event]:
        first = self._peek()
        if first == "[":
            self._at += 1
            yield from self._list()
            return
        if first != "{":
            shown = self._buffer[self._at : self._at + 20]
            what = f"it begins with {shown!r}" if shown else "there is nothing in it"
            if self.truncated:
                what = "its gzip data cannot be read"
            raise BadInput(f"{self.path} is no chrome trace: {what}")
        self._at += 1
        found = False
        while (character := self._peek()) and character != "}":
            key = self._value()
            if key is None or self._peek() != ":":
                break
            self._at += 1
            if key == "traceEvents" and self._peek() == "[":
                found = True
                self._at += 1
                yield from self._list()
            else:
                self.header[str(key)] = self._value()
        if not found:
            raise BadInput(f"{self.path} is no chrome trace: it has no list traceEvents")

    def _list(self) -> Iterator[Event]:
        while (character := self._peek()) and character != "]":
            value = self._value()
            if isinstance(value, dict):
                yield value
            elif value is None and not self._resume():
                return
        if character:
            self._at += 1
        else:
            self.truncated = True

    def _value(self) -> Any:
        """The value here; None, without moving, where it cannot be read."""
        self._peek()
        while True:
            try:
                value, self._at = self._decode(self._buffer, self._at)
                return value
            except json.JSONDecodeError as error:
                rest = len(self._buffer) - self._at
                near_end = error.pos > len(self._buffer) - 4096 or "Unterminated" in error.msg
                if self._ended or rest > LARGEST_VALUE or not near_end:
                    return None
                self._more()
            except RecursionError:
                return None

    def _resume(self) -> bool:
        """After what cannot be read: to the next event, if there is one."""
        while True:
            match = NEXT_EVENT.search(self._buffer, self._at)
            if match:
                self.broken += 1
                self._at = match.end()
                return True
            if self._ended:
                self.truncated = True
                return False
            self._at = max(self._at, len(self._buffer) - LONGEST_GAP)
            self._more()

    def _peek(self) -> str:
        """The next character that counts; empty at the end."""
        while True:
            match = SPACE.match(self._buffer, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if self._ended:
                return ""
            self._more()

    def _more(self) -> None:
        data = self._read()
        self._ended = not data
        self._buffer = self._buffer[self._at :] + self._text.decode(data, self._ended)
        self._at = 0
        self._tick(self._raw.tell() / self._size)

    def _read(self) -> bytes:
        """The next bytes, unzipped; none at the end. What a torn gzip file still gives is given."""
        if self._unzip is None:
            return self._raw.read(CHUNK_BYTES)
        while raw := self._zipped or self._raw.read(CHUNK_BYTES):
            if self._unzip.eof:  # one member of several; what else follows a member is padding
                if not raw.startswith(GZIP):
                    return b""
                self._unzip = zlib.decompressobj(ZLIB_GZIP)
            data = self._unzipped(raw)
            if data:
                return data
        self.truncated |= not self._unzip.eof
        return b""

    def _unzipped(self, raw: bytes) -> bytes:
        assert self._unzip is not None
        before = self._unzip.copy()
        try:
            data = self._unzip.decompress(raw, LARGEST_READ)
            self._zipped = self._unzip.unconsumed_tail or self._unzip.unused_data
            return data
        except zlib.error:
            self.truncated = True
            self._zipped = b""
            self._raw.seek(0, 2)
        data = b""
        with contextlib.suppress(zlib.error):
            for byte in raw:  # as far as it goes
                data += before.decompress(bytes([byte]))
        return data
