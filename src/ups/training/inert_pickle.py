"""Reads a pickle as plain data: nothing is imported, nothing is called, whatever the file says.

`pickle.load` runs what a file asks for, and even an unpickler with a list of allowed classes hands those classes to the
file, which may then change their attributes. Here a class is only its name: "call this with these arguments" becomes an
`Instance` that remembers both. Only the few operations that `pickle.dump` writes for plain data classes are known;
everything else is refused. Memory is bounded by the size of the file. What the names mean: `checkpoint_metadata.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

MAX_BYTES = 1 << 30


class UnknownPickleError(ValueError):
    """The file is not a pickle of plain data classes; the message says what it asked for."""


class Global:
    """The name of a class or function, never the thing itself."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Instance:
    """What the file wants made: the name of a class or function, its arguments, and the state set afterwards."""

    __slots__ = ("arguments", "of", "state")

    def __init__(self, of: Global, arguments: tuple[Any, ...]) -> None:
        self.of, self.arguments = of, arguments
        self.state: Any = None


_MARK: Final = object()
_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
_EMPTY: dict[int, Callable[[], Any]] = {ord("}"): dict, ord("]"): list, ord(")"): tuple}
_INTEGERS = {ord("M"): struct.Struct("<H"), ord("J"): struct.Struct("<i")}
_BYTE, _LENGTH = struct.Struct("<B"), struct.Struct("<I")


def read_pickle(data: bytes, allowed: frozenset[tuple[str, str]]) -> Any:
    """The value in `data`; `allowed` holds the (module, name) pairs that it may mention.

    Raises UnknownPickleError for any other name and for every operation that plain data does not need.
    """
    try:
        return _Machine(data, allowed).run()
    except (IndexError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise UnknownPickleError(f"it is cut short or damaged ({type(error).__name__})") from error


class _Machine:
    """The stack machine of the pickle format, reduced to data."""

    def __init__(self, data: bytes, allowed: frozenset[tuple[str, str]]) -> None:
        self._data, self._allowed = data, allowed
        self._at = 0
        self._stack: list[Any] = []
        self._memo: list[Any] = []

    def run(self) -> Any:
        """The frequent operations, in line and in order of frequency: large runs have millions of them."""
        data, stack, memo = self._data, self._stack, self._memo
        at = 0
        while True:
            code = data[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif code in (0x52, 0x81):  # REDUCE, NEWOBJ
                arguments = stack.pop()
                stack[-1] = Instance(_of(Global, stack[-1]), _of(tuple, arguments))
            elif code == 0x8C:  # SHORT_BINUNICODE
                end = at + 1 + data[at]
                stack.append(data[at + 1 : end].decode("utf-8"))
                at = end
            elif code == 0x28:  # MARK
                stack.append(_MARK)
            elif code == 0x62:  # BUILD
                state = stack.pop()
                made = _of(Instance, stack[-1])
                if made.state is not None:
                    raise UnknownPickleError("it sets the state of an object twice")
                made.state = state
            elif code == 0x2E:  # STOP
                if len(stack) != 1 or at > len(data):
                    raise UnknownPickleError("it does not hold exactly one value")
                return stack[0]
            else:
                self._at = at
                self._operate(code)
                at = self._at

    def _operate(self, code: int) -> None:
        stack = self._stack
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _EMPTY:
            stack.append(_EMPTY[code]())
        elif code in _INTEGERS:
            stack.append(self._number(_INTEGERS[code]))
        elif code == ord("X"):  # BINUNICODE
            stack.append(self._take(self._number(_LENGTH)).decode("utf-8"))
        elif code == 0x87:  # TUPLE3
            stack.append(tuple(self._pop(3)))
        elif code == ord("t"):
            stack.append(tuple(self._since_mark()))
        elif code in (ord("a"), ord("e")):
            items = [stack.pop()] if code == ord("a") else self._since_mark()
            _of(list, stack[-1]).extend(items)
        elif code in (ord("s"), ord("u")):
            items = self._pop(2) if code == ord("s") else self._since_mark()
            self._fill(items)
        elif code == 0x93:  # STACK_GLOBAL
            module, name = self._pop(2)
            stack.append(self._global(_of(str, module), _of(str, name)))
        elif code == 0x8A:  # LONG1
            size = self._number(_BYTE)
            stack.append(int.from_bytes(self._take(size), "little", signed=True))
        elif code == 0x80:  # PROTO
            if self._number(_BYTE) > 5:
                raise UnknownPickleError("it has a newer pickle protocol")
        elif code == 0x95:  # FRAME: a hint about reading ahead
            self._take(8)
        else:
            raise UnknownPickleError(f"it uses the pickle operation 0x{code:02x} at byte {self._at - 1}")

    def _global(self, module: str, name: str) -> Global:
        if (module, name) not in self._allowed:
            raise UnknownPickleError(f"it asks for '{module[:80]}.{name[:80]}'")
        return Global(module, name)

    def _fill(self, items: list[Any]) -> None:
        target = _of(dict, self._stack[-1])
        if len(items) % 2:
            raise UnknownPickleError("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Instances hash by identity. Nothing else may be a key: hashing tuples in tuples overflows the C stack.
            if type(key) not in (str, Instance):
                raise UnknownPickleError(f"a {type(key).__name__} is used as a key")
            target[key] = value

    def _number(self, layout: struct.Struct) -> int:
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return int(value)

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) != size:
            raise IndexError
        self._at += size
        return taken

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _since_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                taken = self._stack[place + 1 :]
                del self._stack[place:]
                return taken
        raise IndexError


def _of(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value
