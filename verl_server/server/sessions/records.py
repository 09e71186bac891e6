"""The records of a session's history, which the ledger applies and the journal stores.

Each change of a session is one record. The ledger builds the record, applies it to its memory and passes it to the
store. A restarted server reads the same records and applies them in the same order. A record on disk is

    u32 length | u32 crc32 of the rest | u8 kind | msgpack payload       (little-endian)

where the length counts the kind and the payload.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from verl_server.chat.session_view import CompletionText
from verl_server.errors import VerlServerError
from verl_server.messages.session_types import ForcedMode, History, PolicyLogprobs, SessionLimits

FORMAT = 2
FRAME = struct.Struct("<II")
LARGEST = 2**31
"""The most bytes of a record. A larger length is damage."""
_ZEROS = 512
"""Number of bytes. At least so many zeros at the end of a file are a part that was never written."""


class HeaderRecord(msgspec.Struct, frozen=True):
    """First record of each file."""

    format: int
    vocabulary: int
    tokenizer: bytes
    """Digest of the tokenizer, 16 bytes."""
    model_path: str
    previous: int | None = None
    """Bytes of the preceding file. None: this is a snapshot, or the first file of the store."""
    number: int | None = None
    """Number of the file, which is also in its name. None in files of earlier versions."""


class SessionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A session was created."""

    id: str
    key_hash: bytes
    created: float
    parent: str | None = None
    group: str = ""
    metadata: dict[str, Any] = {}
    limits: SessionLimits = SessionLimits()
    history: History = "stored"
    sampling: dict[str, Any] = {}
    forced: dict[str, Any] = {}
    forced_mode: ForcedMode = "override"
    seed: int | None = None
    streaming: bool = False
    weight_demand: str = ""
    """Demand on the weight version (`version_demand`) of requests that state none."""


class BeginRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A turn began. If no `TurnRecord` follows, it was interrupted or cancelled."""

    session: str
    turn: int
    key: bytes | None = None
    body: bytes | None = None


class SampledFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields of a turn that are known when its sample has ended."""

    output: bytes
    """int32 ids."""
    logprobs: bytes
    """Log-probabilities as float32, one for each output id."""
    spans: Sequence[tuple[str, int]]
    finish: tuple[str, str | int | None]
    times: tuple[float, float, float]
    """Times at which the request was accepted, the first token was sampled, and the turn finished."""
    end_token: int = -1
    sampling: bytes = b""
    """JSON: `BranchTurn.sampling` without the seed."""
    policy_logprobs: PolicyLogprobs | None = None
    """`BranchTurn.policy_logprobs`. None in records of older servers."""
    policy: bytes = b""
    """The policy's log-probabilities as float32, one for each output id, if `policy_logprobs` is "given"."""
    has_choice: bytes = b""
    """uint8 for each output id: 1 if masks allowed another token, else 0. Empty if this was not counted."""
    overridden: bytes = b""
    """JSON: `BranchTurn.overridden`, or empty."""
    seed: int | None = None
    key: bytes | None = None
    body: bytes | None = None
    dialect: str = ""
    rid: str = ""


class TurnFields(SampledFields, kw_only=True, omit_defaults=True):
    """The fields of a turn that the store and the ledger's memory have."""

    parent: int
    """Number of the parent turn. -1 for a root."""
    shared: int
    """Number of leading tokens of the prompt that are also the beginning of the parent's sequence."""
    prompt: bytes
    """The prompt's int32 ids after the shared ids."""
    generation_prompt: int = 0
    flags: int = 0
    prompt_node: int = -1
    sibling: int = 0
    branch: int = 0
    began: str | None = None
    """`BranchTurn.began`."""
    options: bytes = b""
    calls: bytes | None = None
    """JSON: list of {"id", "name", "arguments"}."""
    child: str | None = None
    completion: CompletionText | None = None
    messages: bytes = b""
    """The new messages as msgpack."""
    reply: str = ""
    """The reply's text. The ledger keeps it only if `parsed` is None."""
    parsed: tuple[str, str] | None = None
    """(content, reasoning) of the reply. None if its content is `reply`, without reasoning."""


class TurnRecord(TurnFields, omit_defaults=True):
    """A turn has finished."""

    session: str
    turn: int
    first_node: int = 0
    """Index of the first record of `nodes` in the session's message tree."""
    nodes: bytes = b""
    """Records of the message tree that no earlier turn stored."""


class DeliveredRecord(msgspec.Struct, frozen=True):
    """The whole reply of a turn reached the client's socket."""

    session: str
    turn: int


class RewardRecord(msgspec.Struct, frozen=True):
    session: str
    reward: float
    turn: int | None
    name: str


class FinishRecord(msgspec.Struct, frozen=True):
    session: str
    state: str
    """ "finished" or "expired"."""
    reason: str
    time: float


class DeleteRecord(msgspec.Struct, frozen=True):
    session: str


class EndRecord(msgspec.Struct, frozen=True):
    """Last record of a snapshot. `records` is the number of records before it."""

    records: int


class CutRecord(msgspec.Struct, frozen=True):
    """Last record of a journal whose rest was lost and given up, by `verl-server trajectories repair`."""

    reason: str


class CurrentRecord(msgspec.Struct, frozen=True):
    """The only record of the file `current`, which names the last journal."""

    number: int
    size: int | None
    """Bytes of the last journal. None while a server writes the journal, and after a server was killed."""


Record = (
    HeaderRecord
    | SessionRecord
    | BeginRecord
    | TurnRecord
    | DeliveredRecord
    | RewardRecord
    | FinishRecord
    | DeleteRecord
    | EndRecord
    | CutRecord
    | CurrentRecord
)
_KINDS: dict[int, type[msgspec.Struct]] = {
    1: HeaderRecord,
    2: SessionRecord,
    3: BeginRecord,
    4: TurnRecord,
    5: RewardRecord,
    6: FinishRecord,
    7: DeleteRecord,
    8: EndRecord,
    9: DeliveredRecord,
    10: CutRecord,
    11: CurrentRecord,
}
_FIRST_FIELDS = b"|".join(
    bytes((kind,)) + rb"(?:[\x80-\x8f]|\xde..)" + re.escape(msgspec.msgpack.encode(struct_type.__struct_fields__[0]))
    for kind, struct_type in _KINDS.items()
)
_BEGINNING = re.compile(_FIRST_FIELDS, re.DOTALL)
"""The first bytes of a payload: its kind, a map, and the name of the first field, which is always there."""
KIND_OF = {struct_type: kind for kind, struct_type in _KINDS.items()}
"""Type of a record -> its kind on disk."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = {kind: msgspec.msgpack.Decoder(struct_type) for kind, struct_type in _KINDS.items()}


class DamagedRecordError(VerlServerError):
    """Some bytes of a journal are not a valid record."""


def payload(record: Record) -> bytes:
    """Return kind and msgpack payload, without length and checksum."""
    return bytes((KIND_OF[type(record)],)) + _ENCODER.encode(record)


def frame(body: bytes) -> bytes:
    """Return length and checksum of a payload. The writer calls it in its thread: crc32 releases the interpreter."""
    return FRAME.pack(len(body), zlib.crc32(body))


def framed(record: Record) -> bytes:
    """Return a whole record as it is on disk."""
    body = payload(record)
    return frame(body) + body


def has_record(data: bytes, start: int) -> bool:
    """Return True if a valid record begins at `start` or later."""
    for offset in possible_records(data, start):
        try:
            read_record(data, offset)
        except DamagedRecordError:
            continue
        return True
    return False


def possible_records(data: bytes, start: int) -> Iterator[int]:
    """Yield the offsets from `start` on at which the bytes look like a record. Its checksum is not compared."""
    return (found.start() - FRAME.size for found in _BEGINNING.finditer(data, start + FRAME.size))


def is_cut_off(data: bytes, offset: int) -> bool:
    """Return True if the damaged record at `offset` was never completely written: it is cut off, or zeros.

    A killed server leaves the beginning of a record, and a host that lost power may leave zeros. In contrast, a record
    with its whole length and a wrong checksum was stored once, and so was a damaged record that other records follow.
    """
    if not data[offset:].strip(b"\0"):
        return True
    if len(data) - offset >= FRAME.size:
        length, checksum = FRAME.unpack_from(data, offset)
        start = offset + FRAME.size
        is_whole = start + length <= len(data) or zlib.crc32(data[start:]) == checksum
        if is_whole and data[-_ZEROS:].strip(b"\0"):
            return False
    return not has_record(data, offset + 1)


def read_record(data: bytes | memoryview, offset: int) -> tuple[Any, int]:
    """Return (record at `offset`, offset after it). Raise DamagedRecordError if the record is damaged or cut off."""
    if len(data) - offset < FRAME.size:
        raise DamagedRecordError(f"{len(data) - offset} bytes are less than a record's head")
    length, checksum = FRAME.unpack_from(data, offset)
    start, end = offset + FRAME.size, offset + FRAME.size + length
    if not 1 <= length < LARGEST or end > len(data):
        raise DamagedRecordError(f"a record of {length} bytes goes beyond the end of the file")
    body = data[start:end]
    if zlib.crc32(body) != checksum:
        raise DamagedRecordError("the checksum is wrong")
    return decoded(body), end


def decoded(body: bytes | memoryview) -> Any:
    """Return the record of a kind and its payload. Raise DamagedRecordError if they are none."""
    decoder = _DECODERS.get(body[0])
    if decoder is None:
        raise DamagedRecordError(f"the kind {body[0]} is unknown")
    try:
        return decoder.decode(body[1:])
    except msgspec.DecodeError as error:
        raise DamagedRecordError(f"the payload is malformed: {error}") from None
