"""`Recent`: a bounded dict of texts that drops what was not used for the longest time."""

from __future__ import annotations

from collections import OrderedDict


class Recent:
    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[object, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, name: object) -> str | None:
        value = self._values.get(name)
        if value is not None:
            self._values.move_to_end(name)
        return value

    def put(self, name: object, value: str) -> None:
        self._values[name] = value
        self._values.move_to_end(name)
        while len(self._values) > self._most:
            self._values.popitem(last=False)

    def drop(self, name: object) -> None:
        self._values.pop(name, None)
