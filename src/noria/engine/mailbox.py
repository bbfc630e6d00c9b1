"""The engine process's end of the socket to its client.

Used by the main thread alone, between steps: no other thread has to be woken for a message, nor takes processor time
from the kernels. What arrives during a step waits in the system's buffer and, when that is full, with the client, whose
end never blocks.
"""

from __future__ import annotations

import logging
import os
import select
import socket

import msgspec

from noria.errors import NoriaError
from noria.messages import FromEngine, ToEngine
from noria.wire import Frames, frame

_log = logging.getLogger("noria.engine")
_PIECE = 1 << 16  # bytes read at a time


class Mailbox:
    """Connects to the client. When that is gone, so is the process: nobody is left to answer.

    Args:
        address: path of the Unix socket that the client listens on.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address)
        self._frames = Frames()
        self._piece = memoryview(bytearray(_PIECE))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        """Returns when the message is in the system's hands; a client that does not read holds the engine back."""
        try:
            self._socket.sendall(frame(self._encoder.encode(message)))
        except OSError:
            os._exit(1)

    def receive(self, wait: float | None) -> list[ToEngine]:
        """All messages that are there, after sleeping up to `wait` seconds (None: forever) for the first."""
        if wait != 0.0:
            select.select((self._socket.fileno(),), (), (), wait)
        messages: list[ToEngine] = []
        while True:
            try:
                count = self._socket.recv_into(self._piece, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except ConnectionError:
                count = 0
            if count == 0:
                if messages:
                    return messages
                os._exit(1)
            for data in self._frames.feed(self._piece[:count]):
                self._decode(data, messages)

    def close(self) -> None:
        """What was sent can still be read."""
        self._socket.close()

    def _decode(self, data: bytes, messages: list[ToEngine]) -> None:
        try:
            messages.append(self._decoder.decode(data))
        except (msgspec.MsgspecError, NoriaError) as error:
            # Both sides are one build, so this is a defect of ours; it must not take the others' requests along.
            _log.error("a message that cannot be read was dropped: %s", error)
