"""Payloads of SGLang's clients are converted to handles. A hostile payload is an error that names the place."""

from __future__ import annotations

import base64
import fcntl
import math
import os
import pickle
import random
from collections.abc import Iterator
from multiprocessing import reduction
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from tests.weight_sync import sglang_payloads as sglang
from tests.weight_sync.fakes import FakeRunner, random_weights
from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.weight_sync import pickle_reader, shm_file
from verl_server.weight_sync.handles import Allocation, TensorHandle
from verl_server.weight_sync.receiver.memory_file import FileView, MemoryFile
from verl_server.weight_sync.receiver.open_memory import OpenAllocations
from verl_server.weight_sync.receiver.weight_receiver import WeightReceiver
from verl_server.weight_sync.sglang.payloads import give_back, parse_payload
from verl_server.weight_sync.shm_file import open_shm_file

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def file_system() -> Iterator[None]:
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    yield
    mp.set_sharing_strategy(before)


def read(handle: TensorHandle) -> torch.Tensor:
    dtype = getattr(torch, handle.dtype)
    if math.prod(handle.shape) == 0:
        return torch.empty(handle.shape, dtype=dtype)
    fd, path = open_shm_file(handle.allocation)
    file = MemoryFile(fd, path, handle.allocation.storage_offset_bytes)
    view = FileView(file, dtype, handle.shape, handle.stride, handle.storage_offset)
    view.read()
    return view.data


def opened(handles: list[tuple[str, TensorHandle]]) -> dict[str, torch.Tensor]:
    return {name: read(handle) for name, handle in handles}


def references(name: str) -> int:
    with open(f"/dev/shm/{name}", "rb") as file:
        return int.from_bytes(file.read(4), "little")


# -- tensors on the CPU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pairs_of_every_protocol_and_encoding(protocol: int) -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    tensors = {
        "matrix": matrix,
        "transposed": matrix.t(),
        "row": matrix[1],
        "parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "empty": torch.empty(0, 4),
    }
    payload = sglang.dumps(list(tensors.items()), protocol)
    once = base64.b64encode(payload)
    for data in (payload, once, once.decode(), base64.b64encode(once), base64.b64encode(once).decode()):
        found = opened(parse_payload(data, None))
        assert list(found) == list(tensors)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
        assert [found[name].dtype for name in tensors] == [tensor.dtype for tensor in tensors.values()]


def test_each_pickled_reference_is_given_back_once() -> None:
    tensor = torch.ones(5)
    [(_, first)] = parse_payload(sglang.dumps([("w", tensor)]), None)
    [(_, second)] = parse_payload(sglang.dumps([("w", tensor)]), None)
    name = first.allocation.name
    assert first.allocation.id != second.allocation.id and references(name) == 3
    read(first)
    assert references(name) == 2
    read(second)
    assert references(name) == 1
    read(second)  # a second rank reads the same payload: the owner's own reference stays
    assert references(name) == 1


def test_an_open_file_locks_out_no_other_rank() -> None:
    tensor = torch.ones(5)
    [(_, handle)] = parse_payload(sglang.dumps([("w", tensor)]), None)
    fd, path = open_shm_file(handle.allocation)
    other = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # what another rank does, without a wait
    finally:
        os.close(other)
        os.close(fd)


def test_a_lock_that_somebody_keeps_ends_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_file, "_LOCK_SECONDS", 0.01)
    tensor = torch.ones(5)
    [(_, handle)] = parse_payload(sglang.dumps([("w", tensor)]), None)
    owner = os.open(f"/dev/shm/{handle.allocation.name}", os.O_RDWR)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with pytest.raises(WeightUpdateError, match="kept the lock"):
            open_shm_file(handle.allocation)
    finally:
        os.close(owner)


def test_references_that_nobody_will_open_are_given_back() -> None:
    tensors = [("w", torch.ones(5)), ("v", torch.ones(2))]
    handles = parse_payload(sglang.dumps(tensors), None)
    assert [references(handle.allocation.name) for _, handle in handles] == [2, 2]
    give_back(handle.allocation for _, handle in handles)
    assert [references(handle.allocation.name) for _, handle in handles] == [1, 1]
    give_back([Allocation(id="x", kind="shm_name", name="torch_1_1_1", nbytes=1)])  # the file is gone: no error


def test_a_refused_update_gives_all_references_back() -> None:
    runner = FakeRunner()
    receiver = WeightReceiver(runner.weight_map, 0, 1, CPU)
    weights = list(random_weights(1).items())
    for entries, message in (
        ([*weights, ("unknown", torch.ones(2))], "no parameter 'unknown'"),
        ([(weights[0][0], torch.ones(8, 4).int()), *weights[1:]], "int32"),
        ([(weights[0][0], torch.ones(3, 3)), *weights[1:]], "shape"),
    ):
        handles = parse_payload(sglang.dumps(entries), None)
        with pytest.raises(WeightUpdateError, match=message):
            receiver.stage_named(handles, strict_dtype=False, partial=True)
        assert {references(handle.allocation.name) for _, handle in handles} == {1}
    with sglang.stub_modules(**{f"{sglang.BUCKETS}:FlattenedTensorMetadata": sglang.FlattenedTensorMetadata}):
        bucket = sglang.bucket([*weights, ("unknown", torch.ones(2))])
        handles = parse_payload(sglang.dumps(bucket), "flattened_bucket")
    flat = sglang.dumps(bucket["flattened_tensor"])  # adds a reference that nobody returns
    with pytest.raises(WeightUpdateError, match="no parameter 'unknown'"):
        receiver.stage_named(handles, strict_dtype=False, partial=True)
    assert flat and references(handles[0][1].allocation.name) == 2
    handles = parse_payload(sglang.dumps(weights), None)
    plan = receiver.stage_named(handles, strict_dtype=False, partial=False)
    plan.commit()
    assert runner.holds(dict(weights))


def test_values_of_a_rank() -> None:
    for module in (sglang.OLD, sglang.UPDATER):
        with sglang.stub_modules(**{f"{module}:LocalSerializedTensor": sglang.LocalSerializedTensor}):
            values = [sglang.dumps(torch.full((2,), float(rank))) for rank in range(2)]
            payload = sglang.dumps([("w", sglang.LocalSerializedTensor(values))])
        for rank in range(2):
            assert opened(parse_payload(payload, None, rank=rank))["w"].tolist() == [rank, rank]
        with pytest.raises(BadRequestError, match="'w' has 2 values, but this is tensor-parallel rank 2"):
            parse_payload(payload, None, rank=2)


def test_a_refused_value_of_a_rank_says_which() -> None:
    with sglang.stub_modules(**{f"{sglang.OLD}:LocalSerializedTensor": sglang.LocalSerializedTensor}):
        payload = sglang.dumps([("w", sglang.LocalSerializedTensor([pickle.dumps(os.system)]))])
    with pytest.raises(BadRequestError, match=r"'w', value 0: .*posix.system is not allowed"):
        parse_payload(payload, None)


@pytest.mark.parametrize("module", [sglang.OLD, sglang.BUCKETS])
@pytest.mark.parametrize("count_bytes", [True, False])
def test_flattened_buckets(module: str, count_bytes: bool) -> None:
    other = torch.float32 if count_bytes else torch.bfloat16
    tensors = [
        ("a", torch.randn(2, 3).bfloat16()),
        ("b", torch.randn(4, dtype=other)),
        ("c", torch.randn(()).to(other)),
    ]
    with sglang.stub_modules(**{f"{module}:FlattenedTensorMetadata": sglang.FlattenedTensorMetadata}):
        payload = sglang.dumps(sglang.bucket(tensors, count_bytes=count_bytes))
    found = opened(parse_payload(payload, "flattened_bucket"))
    assert list(found) == ["a", "b", "c"]
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"end_idx": 23}, "does not fill elements 0 to 23"),
        ({"start_idx": 24, "end_idx": 48}, "of a bucket of 24"),
        ({"start_idx": -24, "end_idx": 0}, "no integer from 0"),
        ({"shape": torch.Size([2, 2])}, "does not fill"),
        ({"shape": torch.Size([2, 2, 0])}, "does not fill"),
        ({"dtype": torch.float64, "shape": torch.Size([2]), "start_idx": 4, "end_idx": 20}, "byte 4 of its storage"),
        ({"name": 7}, "no FlattenedTensorMetadata"),
        ({"name": "a\nb"}, "no name of a parameter"),
        ({"shape": "ab"}, "no tuple of at most 16 integers"),
    ],
)
def test_wrong_buckets(change: dict[str, Any], message: str) -> None:
    payload = sglang.bucket([("a", torch.ones(2, 3))])
    payload["metadata"][0].__dict__.update(change)
    with sglang.stub_modules(**{f"{sglang.BUCKETS}:FlattenedTensorMetadata": sglang.FlattenedTensorMetadata}):
        data = sglang.dumps(payload)
    with pytest.raises(BadRequestError, match=message):
        parse_payload(data, "flattened_bucket")


def test_a_bucket_of_elements_has_one_dtype() -> None:
    payload = sglang.bucket([("a", torch.ones(4))], count_bytes=False)
    payload["metadata"][0].dtype = torch.bfloat16
    with sglang.stub_modules(**{f"{sglang.BUCKETS}:FlattenedTensorMetadata": sglang.FlattenedTensorMetadata}):
        data = sglang.dumps(payload)
    with pytest.raises(BadRequestError, match="'a' is bfloat16, but the bucket is float32"):
        parse_payload(data, "flattened_bucket")


# -- tensors on GPUs ------------------------------------------------------------------------------------------


def cuda_args(device: Any = 1, **changes: Any) -> list[Any]:
    values = {
        "cls": torch.Tensor,
        "shape": torch.Size([2, 3]),
        "stride": (3, 1),
        "offset": 5,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.bfloat16,
        "device": device,
        "handle": b"\x01c" + bytes(64),
        "nbytes": 4096,
        "storage_offset_bytes": 512,
        "requires_grad": True,
        "ref_counter_handle": b"/torch_17_1_2",
        "ref_counter_offset": 9,
        "event_handle": bytes(64),
        "event_sync_required": True,
    }
    return list((values | changes).values())


def test_cuda_tensors_of_torch_and_of_sglang() -> None:
    uuid = "0d5f6a2c-1111-2222-3333-444455556666"
    modified = sglang._rebuild_cuda_tensor_modified
    payloads = [(sglang.dumps([("w", sglang.CudaTensor(rebuild_cuda_tensor, *cuda_args()))]), "")]
    for module in ("sglang.srt.utils.patch_torch", "sglang.srt.patch_torch"):
        with sglang.stub_modules(**{f"{module}:_rebuild_cuda_tensor_modified": modified}):
            for device in (uuid, f"GPU-{uuid}"):
                payloads.append((sglang.dumps([("w", sglang.CudaTensor(modified, *cuda_args(device)))]), uuid))
    for payload, device_uuid in payloads:
        [(name, handle)] = parse_payload(payload, None)
        assert name == "w"
        assert (handle.dtype, handle.shape, handle.stride, handle.storage_offset) == ("bfloat16", [2, 3], [3, 1], 5)
        assert handle.allocation == Allocation(
            id=handle.allocation.id,
            kind="cuda",
            nbytes=4096,
            device_uuid=device_uuid,
            handle=b"\x01c" + bytes(64),
            storage_offset_bytes=512,
            ref_counter_handle=b"/torch_17_1_2",
            ref_counter_offset=9,
            event_handle=bytes(64),
            event_sync_required=True,
        )


def test_an_empty_cuda_tensor_opens_nothing() -> None:
    args = cuda_args(shape=torch.Size([0]), stride=(1,), handle=None, nbytes=0, event_sync_required=None)
    [(_, handle)] = parse_payload(sglang.dumps([("w", sglang.CudaTensor(rebuild_cuda_tensor, *args))]), None)
    assert handle.allocation.nbytes == 0 and handle.allocation.handle == b"" and handle.shape == [0]


def test_a_wrapped_parameter_is_its_tensor() -> None:
    inner = sglang.CudaTensor(rebuild_cuda_tensor, *cuda_args())
    wrapped = sglang.CudaTensor(torch._utils._rebuild_parameter, inner, True, __import__("collections").OrderedDict())
    [(_, handle)] = parse_payload(sglang.dumps([("w", wrapped)]), None)
    assert handle.shape == [2, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"ref_counter_offset": 10_000},  # torch would write past the end of its file of counters
        {"ref_counter_offset": -1},
        {"ref_counter_handle": b"/../etc/passwd"},
        {"ref_counter_handle": b"torch"},
        {"handle": b"x" * 70_000},
        {"handle": "text"},
        {"nbytes": 2**63},
        {"nbytes": 1.5},
        {"shape": (1,) * 17},
        {"shape": (True, 2)},
        {"dtype": "bfloat16"},
        {"event_handle": b"x" * 65},
    ],
)
def test_wrong_cuda_tensors(changes: dict[str, Any]) -> None:
    payload = sglang.dumps([("w", sglang.CudaTensor(rebuild_cuda_tensor, *cuda_args(**changes)))])
    with pytest.raises(BadRequestError, match="refused at byte"):
        parse_payload(payload, None)


# -- refused payloads -----------------------------------------------------------------------------------------


class Call:
    """An object whose pickle is a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced


def test_globals_that_are_not_weights_are_named_and_not_called(tmp_path: Any) -> None:
    canary = tmp_path / "canary"
    calls = [
        (os.system, f"touch {canary}"),
        (eval, f"open({str(canary)!r}, 'w')"),
        (getattr, "torch", "load"),
        (__import__, "os"),
        (torch.load, str(canary)),
        (reduction._rebuild_socket, 1),  # type: ignore[attr-defined]
    ]
    for function, *args in calls:
        payload = pickle.dumps([("w", Call(function, *args))], protocol=4)
        with pytest.raises(BadRequestError) as caught:
            parse_payload(payload, None)
        name = f"{function.__module__}.{function.__qualname__}"
        assert f"the global {name} is not allowed" in str(caught.value)
        place = int(str(caught.value).split("at byte ")[1].split(" ")[0])
        assert payload[place : place + 1] == pickle.STACK_GLOBAL
        assert caught.value.status_code == 400 and not canary.exists()


def test_formats_that_are_not_ours() -> None:
    payload = sglang.dumps([("w", torch.ones(1))])
    with pytest.raises(BadRequestError, match="'direct' is not supported: it uses the parameter names inside SGLang"):
        parse_payload(payload, "direct")
    with pytest.raises(BadRequestError, match=r"load_format='my\.loader' is not supported"):
        parse_payload(payload, "my.loader")
    with pytest.raises(BadRequestError, match='A payload of load_format="flattened_bucket" is'):
        parse_payload(payload, "flattened_bucket")
    with pytest.raises(BadRequestError, match="not a list of"):
        parse_payload(sglang.dumps({"w": torch.ones(1)}), None)
    with pytest.raises(BadRequestError, match="Entry 0 of the payload"):
        parse_payload(sglang.dumps([torch.ones(1)]), None)
    with pytest.raises(BadRequestError, match="'w' is not a tensor"):
        parse_payload(sglang.dumps([("w", 3)]), None)


def test_tensors_that_only_a_child_process_or_pickle_could_read_say_what_to_do() -> None:
    mp.set_sharing_strategy("file_descriptor")
    with pytest.raises(BadRequestError, match=r"set_sharing_strategy\('file_system'\)"):
        parse_payload(sglang.dumps([("w", torch.ones(1))]), None)
    with pytest.raises(BadRequestError, match=r"values are inside the pickle\. Serialize with"):
        parse_payload(pickle.dumps([("w", torch.ones(1))]), None)


@pytest.mark.parametrize("data", [b"", "", b"\x80", "gA==", "not base64!", b"\x80\x01.", b"\x80\x06.", "é", "A" * 9])
def test_no_pickle_at_all(data: str | bytes) -> None:
    with pytest.raises(BadRequestError):
        parse_payload(data, None)


def test_cut_off_and_damaged_payloads_are_errors_of_the_request() -> None:
    payload = sglang.dumps([("w", torch.ones(2, 2)), ("v", torch.ones(3))])
    for end in range(len(payload)):
        with pytest.raises(BadRequestError):
            parse_payload(payload[:end], None)
    generator = random.Random(7)
    for _ in range(3000):
        damaged = bytearray(payload)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(2, len(payload))] = generator.randrange(256)
        try:
            handles = parse_payload(bytes(damaged), None)
        except BadRequestError as error:
            str(error).encode()  # the message is sent to the client, so it must be encodable
        else:
            assert all(isinstance(handle, TensorHandle) for _, handle in handles)


P4 = b"\x80\x04"
SIZE = b"\x8c\x05torch\x8c\x04Size\x93"


@pytest.mark.parametrize(
    "payload",
    {
        "nested": P4 + b"]" * 300_000 + b"a" * 299_999 + b".",
        "tuples in tuples": P4 + b")" + b"\x85" * 300_000 + b".",
        "a list in itself": P4 + b"]\x94h\x00a.",
        "doubling": P4 + b"]\x94" + b"h\x00h\x00\x86\x94" * 100_000 + b".",
        "a pickle without an end": P4 + b"N" * 300_000,
        "a length that is not there": P4 + b"\x8d" + b"\xff" * 7 + b"\x7f" + b"x",
        "memo of nothing": P4 + b"h\x05.",
        "memoize of nothing": P4 + b"\x94.",
        "mark without values": P4 + b"(\x94.",
        "a tuple without a mark": P4 + b"NNt.",
        "extension registry": P4 + b"\x82\x01.",
        "persistent id": P4 + b"NQ.",
        "old instance": P4 + b"(ios\nsystem\n.",
        "out of band": P4 + b"\x97.",
        "numbers as keys": P4 + b"}K\x01Ns.",
        "one long shape for all": P4 + b"(" + b"K\x01" * 10_000 + b"t\x94" + (SIZE + b"h\x00\x85R") * 10_000 + b".",
    }.items(),
    ids=lambda item: item[0],
)
def test_hostile_pickles_end(payload: tuple[str, bytes]) -> None:
    with pytest.raises(BadRequestError):
        parse_payload(payload[1], None)


def test_text_cannot_be_encoded_to_more_bytes_than_came_in() -> None:
    text = b"X" + (50_000).to_bytes(4, "little") + b"x" * 50_000 + b"\x94X\x06\x00\x00\x00latin1\x94"
    payload = b"\x80\x04" + text + b"c_codecs\nencode\n\x94" + b"h\x02h\x00h\x01\x86R" * 1000 + b"."
    with pytest.raises(BadRequestError, match="more bytes are written as text than the payload has"):
        parse_payload(payload, None)


def test_a_record_has_few_fields() -> None:
    with sglang.stub_modules(**{f"{sglang.BUCKETS}:FlattenedTensorMetadata": sglang.FlattenedTensorMetadata}):
        record = sglang.bucket([("a", torch.ones(1))])["metadata"][0]
        record.__dict__.update({f"field{index}": 0 for index in range(100)})
        payload = sglang.dumps(record)
    with pytest.raises(BadRequestError, match="BUILD"):
        parse_payload(payload, None)


def test_the_number_of_opcodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = sglang.dumps([("w", torch.ones(1))])
    monkeypatch.setattr(pickle_reader, "MAX_OPCODES", 20)
    with pytest.raises(BadRequestError, match="more than 20 opcodes"):
        parse_payload(payload, None)


# -- files in /dev/shm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "..", "../etc/passwd", "psm_1234", "torch_1_2", "torch_1_2_3/x", "torch_1_2_3\n"])
def test_only_files_of_torch_are_read(name: str) -> None:
    with pytest.raises(WeightUpdateError, match="not a shared-memory file of torch's"):
        open_shm_file(Allocation(id="x", kind="shm_name", name=name, nbytes=1))


def test_shared_memory_that_is_not_there_or_too_small_or_a_link() -> None:
    name = f"torch_{os.getpid()}_{random.randrange(2**31)}_0"
    allocation = Allocation(id="x", kind="shm_name", name=name, nbytes=100, storage_offset_bytes=64)
    with pytest.raises(WeightUpdateError, match="did it keep the tensor until the reply"):
        open_shm_file(allocation)
    try:
        with open(f"/dev/shm/{name}", "wb") as file:
            file.write(bytes(163))
        with pytest.raises(WeightUpdateError, match="has 163 bytes, too few for 100"):
            open_shm_file(allocation)
        os.rename(f"/dev/shm/{name}", f"/dev/shm/{name}0")
        os.symlink(f"/dev/shm/{name}0", f"/dev/shm/{name}")
        with pytest.raises(WeightUpdateError, match="Cannot open"):
            open_shm_file(allocation)
    finally:
        for path in (f"/dev/shm/{name}", f"/dev/shm/{name}0"):
            if os.path.lexists(path):
                os.unlink(path)


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(1 << 16)
    [(_, handle)] = parse_payload(sglang.dumps([("w", tensor)]), None)
    preadv = os.preadv

    def cutting(fd: int, buffers: Any, offset: int) -> int:
        os.ftruncate(fd, 4096)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cutting)
    with pytest.raises(WeightUpdateError, match="was cut off while it was read, at byte 4,096"):
        read(handle)


def test_only_the_elements_of_a_large_file_are_read() -> None:
    name = f"torch_{os.getpid()}_{random.randrange(2**31)}_0"
    allocation = Allocation(id="x", kind="shm_name", name=name, nbytes=1 << 50, storage_offset_bytes=64)
    try:
        with open(f"/dev/shm/{name}", "wb") as file:
            file.truncate(64 + (1 << 50))  # sparse: a petabyte that takes no memory
            file.seek(64 + 4 * 7)
            file.write(torch.arange(3.0).numpy().tobytes())
        handle = TensorHandle(allocation=allocation, dtype="float32", shape=[3], stride=[1], storage_offset=7)
        assert torch.equal(OpenAllocations(torch.device("cpu")).view("w", handle), torch.arange(3.0))
    finally:
        os.unlink(f"/dev/shm/{name}")
