"""Messages on a stream of bytes, such as a Unix socket: each behind its length, 4 bytes, little-endian.

Knows nothing of what is in them. Both ends are ours and of one build, so that a length is believed.
"""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<I")


def frame(message: bytes) -> bytes:
    """A message as it goes on the stream; at most 4 GiB."""
    return _LENGTH.pack(len(message)) + message


class Frames:
    """Cuts what is read from a stream, in whatever pieces it comes, into messages again."""

    __slots__ = ("_rest", "_wanted")

    def __init__(self) -> None:
        self._rest = bytearray()  # the beginning of a message
        self._wanted = _LENGTH.size  # bytes that `_rest` must have before it is worth a look

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Takes what has been read; returns the messages that are complete."""
        rest = self._rest
        rest += data
        messages: list[bytes] = []
        at = 0
        while len(rest) - at >= self._wanted:
            (length,) = _LENGTH.unpack_from(rest, at)
            end = at + _LENGTH.size + length
            if end > len(rest):
                self._wanted = _LENGTH.size + length
                break
            messages.append(bytes(rest[at + _LENGTH.size : end]))
            at, self._wanted = end, _LENGTH.size
        del rest[:at]
        return messages
