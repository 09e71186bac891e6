"""Reads a pickle as data. The reader converts opcodes into plain values, and imports or calls nothing by name.

`sglang.payloads`, `vllm.ipc_handles`, `group.unique_id` and `group.state_dicts` pass it the bytes of a wire format and
a table of the globals that may occur in them. The table maps each name to a value of this package: a `Function`, a
`RecordClass`, or a constant. For a name that is not in the table, or an opcode that those formats do not use, the
reader raises BadRequestError with the position. The work is bounded by the length of the pickle: each opcode does a
constant amount of work, besides copying its own argument, and no value is visited recursively.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_server.errors import BadRequestError

MAX_OPCODES = 4_000_000
"""The most opcodes of a pickle: enough for about 60,000 tensors. A longer pickle would only keep the reader busy."""
_MAX_FIELDS = 64
"""The most entries of a record's state. The state is copied each time that the pickle refers to the state."""
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class Function:
    """A global that a pickle may call.

    `build` takes the arguments, and raises ValueError if the arguments are wrong.
    """

    build: Callable[..., Any]


@dataclass(frozen=True)
class RecordClass:
    """A global that a pickle may instantiate without arguments; its state becomes the fields of a `Record`."""

    name: str


@dataclass(frozen=True)
class Record:
    """An instance of a `RecordClass`: a name and fields, no behaviour."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)


Globals = Mapping[tuple[str, str], Any]
"""(module, name) in the pickle -> value that replaces the global."""


def read_pickle(data: bytes, known: Globals) -> Any:
    """Return the value that `data` (protocol 2 to 5) describes.

    Raise BadRequestError, which names the refused global or opcode and its position.
    """
    if data[:1] != b"\x80" or not 2 <= (data[1] if len(data) > 1 else 0) <= 5:
        raise BadRequestError("The payload is not a pickle of protocol 2 to 5.")
    return _Machine(data, known).run()


class _Machine:
    """Pickle's stack machine, without its power. The stack and the memo hold only values of the kinds above."""

    def __init__(self, data: bytes, known: Globals) -> None:
        self._data, self._known = data, known
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._encoded = 0

    def run(self) -> Any:
        position = 0
        try:
            for count, (opcode, argument, at) in enumerate(pickletools.genops(self._data)):
                position = at or 0
                if count >= MAX_OPCODES:
                    raise ValueError(f"more than {MAX_OPCODES:,} opcodes; send fewer tensors at a time")
                if opcode.name == "STOP":
                    return self._pop()
                self._step(opcode.name, argument)
        except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError) as error:
            raise BadRequestError(f"The payload was refused at byte {position} of its pickle: {error}.") from None
        raise BadRequestError("The payload was refused: its pickle has no end.")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _LITERALS:
            stack.append(argument)
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._top()
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self._memo:
                raise ValueError(f"memo {argument} was never written")
            stack.append(self._memo[argument])
        elif name in _TUPLES:
            stack.append(tuple(self._pop_many(_TUPLES[name])))
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_LIST", "APPEND", "APPENDS"):
            self._list(name)
        elif name in ("EMPTY_DICT", "SETITEM", "SETITEMS"):
            self._dict(name)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(self._global(*(argument.split(" ", 1) if name == "GLOBAL" else self._pop_many(2))))
        elif name in ("REDUCE", "NEWOBJ", "BUILD"):
            self._construct(name)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"opcode {name} has no place in a payload of weights")

    # -- containers --------------------------------------------------------------------------------------------

    def _top(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise ValueError("the stack is empty")
        return self._stack[-1]

    def _pop(self) -> Any:
        value = self._top()
        self._stack.pop()
        return value

    def _pop_many(self, count: int) -> list[Any]:
        """Pop the topmost `count` values, in the order in which they were pushed."""
        return [self._pop() for _ in range(count)][::-1]

    def _pop_to_mark(self) -> list[Any]:
        values = []
        while self._stack and self._stack[-1] is not _MARK:
            values.append(self._stack.pop())
        if not self._stack:
            raise ValueError("there is no mark on the stack")
        self._stack.pop()
        return values[::-1]

    def _list(self, name: str) -> None:
        if name == "EMPTY_LIST":
            self._stack.append([])
            return
        values = self._pop_many(1) if name == "APPEND" else self._pop_to_mark()
        target = self._top()
        if not isinstance(target, list):
            raise ValueError(f"{name} to something that is not a list")
        target.extend(values)

    def _dict(self, name: str) -> None:
        if name == "EMPTY_DICT":
            self._stack.append({})
            return
        values = self._pop_many(2) if name == "SETITEM" else self._pop_to_mark()
        target, keys = self._top(), values[::2]
        # Only strings as keys: the hashes of numbers can be chosen so that a dict becomes quadratic.
        if not isinstance(target, dict) or len(values) % 2 or not all(isinstance(key, str) for key in keys):
            raise ValueError(f"{name} without a dict, or with a key that is no string")
        target.update(zip(keys, values[1::2], strict=True))

    # -- globals -----------------------------------------------------------------------------------------------

    def _global(self, module: Any, name: Any) -> Any:
        key = (module, name)
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("the name of a global is not a string")
        if key == ("_codecs", "encode"):
            return Function(self._encode)
        if key not in self._known:
            raise ValueError(f"the global {shown(module)}.{shown(name)} is not allowed")
        return self._known[key]

    def _encode(self, text: Any, encoding: Any) -> bytes:
        """Encode a text as bytes, which protocol 2 writes as a call.

        The total is bounded, because one memoized text may be encoded many times.
        """
        if not isinstance(text, str) or encoding != "latin1":
            raise ValueError("_codecs.encode is for bytes written as latin1 text")
        self._encoded += len(text)
        if self._encoded > len(self._data):
            raise ValueError("more bytes are written as text than the payload has")
        return text.encode("latin1")

    def _construct(self, name: str) -> None:
        target, argument = self._pop_many(2)
        if name == "REDUCE" and isinstance(target, Function) and isinstance(argument, tuple):
            self._stack.append(target.build(*argument))
        elif name == "NEWOBJ" and isinstance(target, RecordClass) and argument == ():
            self._stack.append(Record(target.name))
        elif (
            name == "BUILD"
            and isinstance(target, Record)
            and isinstance(argument, dict)
            and len(argument) <= _MAX_FIELDS
        ):
            target.fields.update(argument)
            self._stack.append(target)
        else:
            raise ValueError(f"{name} of something that cannot be called or built so")


def shown(text: str) -> str:
    """Return a string from the wire in a form that is safe in an error message: short, printable and encodable."""
    return ascii(text[:100])[1:-1]
