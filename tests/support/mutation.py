"""Bytes that are nearly right: valid messages with something wrong in them. A seed tells the whole sequence."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_EDGES = (
    b"\x00",
    b"\x7f",
    b"\x80",
    b"\xff",
    b"\xff" * 9 + b"\x01",  # the largest varint
    b"\xff" * 10,  # a varint that does not end
    b"\x80" * 9 + b"\x01",
    b"\x80\x80\x80\x80\x08",  # 2**31
    b"\x00\x00\xc0\x7f",  # NaN
    b"\x00\x00\x80\x7f",  # infinity
    b"\xed\xa0\x80",  # half a pair of surrogates
    b"\xe2\x80\xa8\x1b[2J\n\x00",
)

_TEXTS = (
    "",
    "x",
    "\0",
    "a\nb\x1b[2J\u2028\u202e",
    "x" * 129,
    "<s></s><unk>",
    "{}",
    "[" * 100,
    '{"a": ' * 70 + "1" + "}" * 70,
    '{"role": "x", "content": null}',
    '"\\ud800"',
    "1e999",
    "9" * 5000,
    "{{ messages }}{% for %}",
    "ř🚀\U000f0000\ufeff" * 50,
)


class Mutator:
    """Makes new ones without end. The same `seed` and `valid` make the same ones."""

    def __init__(self, valid: Sequence[bytes], *, seed: int, max_bytes: int = 4096) -> None:
        self._valid = list(valid)
        self._random = random.Random(seed)
        self._max_bytes = max_bytes
        self._changes: list[Callable[[bytearray], None]] = [
            self._flip_a_bit,
            self._set_a_byte,
            self._insert_an_edge,
            self._overwrite_with_an_edge,
            self._cut,
            self._drop_a_piece,
            self._repeat_a_piece,
            self._insert_of_another,
            self._nest,
        ]

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield self.one()

    def one(self) -> bytes:
        """The next. One in twenty is a message as it was, one in twenty nothing but noise."""
        if self._random.random() < 0.05:
            return self._random.randbytes(self._random.randrange(200))
        data = bytearray(self._random.choice(self._valid))
        if self._random.random() < 0.95:
            for _ in range(self._random.choice((1, 1, 1, 2, 3, 8))):
                self._random.choice(self._changes)(data)
        return bytes(data[: self._max_bytes])

    def _place(self, data: bytearray) -> int:
        return self._random.randrange(len(data) + 1)

    def _piece(self, data: bytearray) -> slice:
        start = self._place(data)
        return slice(start, start + self._random.randrange(1, 33))

    def _flip_a_bit(self, data: bytearray) -> None:
        if data:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)

    def _set_a_byte(self, data: bytearray) -> None:
        if data:
            data[self._random.randrange(len(data))] = self._random.randrange(256)

    def _insert_an_edge(self, data: bytearray) -> None:
        at = self._place(data)
        data[at:at] = self._random.choice(_EDGES)

    def _overwrite_with_an_edge(self, data: bytearray) -> None:
        at, edge = self._place(data), self._random.choice(_EDGES)
        data[at : at + len(edge)] = edge

    def _cut(self, data: bytearray) -> None:
        del data[self._place(data) :]

    def _drop_a_piece(self, data: bytearray) -> None:
        del data[self._piece(data)]

    def _repeat_a_piece(self, data: bytearray) -> None:
        at = self._place(data)
        data[at:at] = data[self._piece(data)] * self._random.choice((1, 2, 40))

    def _insert_of_another(self, data: bytearray) -> None:
        at, other = self._place(data), bytearray(self._random.choice(self._valid))
        data[at:at] = other[self._piece(other)]

    def _nest(self, data: bytearray) -> None:
        """Makes it the first field of a message, of one in that, and so on; or puts groups without an end before it."""
        if self._random.random() < 0.3:
            data[:0] = bytes([self._random.randrange(1, 16) << 3 | 3]) * self._random.choice((1, 99, 2000))
            return
        for _ in range(self._random.choice((1, 3, 120))):
            if len(data) < self._max_bytes:
                data[:0] = b"\x0a" + _varint(len(data))


class MessageMutator:
    """Protobuf messages of one type: half of them damaged in their bytes, half with strange values in sound bytes."""

    def __init__(self, valid: Sequence[Message], *, seed: int) -> None:
        self._valid = list(valid)
        self._random = random.Random(seed)
        self._bytes = Mutator([message.SerializeToString() for message in valid], seed=seed)

    def one(self) -> bytes:
        """The next."""
        if self._random.random() < 0.5:
            return self._bytes.one()
        message = type(self._valid[0])()
        message.CopyFrom(self._random.choice(self._valid))
        for _ in range(self._random.choice((1, 1, 2, 4))):
            self._change(message)
        return message.SerializeToString()

    def _change(self, message: Message) -> None:
        """Sets a field of the message, or of one inside."""
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self._random.choice(fields)
        value: Any = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._change_map(field, value)
        elif field.is_repeated:
            self._change_repeated(field, value)
        elif field.message_type is not None:
            value.SetInParent()
            self._change(value)
        elif self._random.random() < 0.1:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, self._scalar(field))

    def _change_map(self, field: FieldDescriptor, values: Any) -> None:
        of_entry = field.message_type.fields_by_name
        key = self._scalar(of_entry["key"])
        if of_entry["value"].message_type is not None:
            self._change(values[key])
        else:
            values[key] = self._scalar(of_entry["value"])

    def _change_repeated(self, field: FieldDescriptor, values: Any) -> None:
        for _ in range(self._random.choice((1, 1, 3, 70))):
            if field.message_type is None:
                values.append(self._scalar(field))
            elif values and self._random.random() < 0.5:
                self._change(self._random.choice(values))
            else:
                self._change(values.add())

    def _scalar(self, field: FieldDescriptor) -> Any:
        kind = FieldDescriptor
        if field.cpp_type in (kind.CPPTYPE_FLOAT, kind.CPPTYPE_DOUBLE):
            return self._random.choice((0.0, -0.0, 1.0, 1e-45, -1.0, 3e38, math.nan, math.inf, -math.inf))
        if field.cpp_type == kind.CPPTYPE_BOOL:
            return self._random.random() < 0.5
        if field.cpp_type == kind.CPPTYPE_STRING:
            text = self._random.choice(_TEXTS)
            return text.encode() if field.type == kind.TYPE_BYTES else text
        bits = 64 if field.cpp_type in (kind.CPPTYPE_INT64, kind.CPPTYPE_UINT64) else 32
        signed = field.cpp_type in (kind.CPPTYPE_INT32, kind.CPPTYPE_INT64, kind.CPPTYPE_ENUM)
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        return self._random.choice((0, 1, 5, 383, 384, low, high, self._random.randint(low, high)))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
