"""The weight methods that every engine has, against a fake engine that records the requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from tests.fake_engine import FakeEngine
from tests.weight_sync.reading import read
from verl_server import (
    BadRequestError,
    ControlTimeoutError,
    ServerDiedError,
    ServerUnavailableError,
    TensorShard,
    UnansweredError,
    VerlServerError,
    WeightUpdateError,
    WeightVersion,
)
from verl_server.errors import UpdateConflictError
from verl_server.messages.io_struct import ControlReply
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    RegisterWeightsReq,
    UnregisterWeightsReq,
    UpdateWeightsFromDistributedReq,
)
from verl_server.weight_sync.trainer.sender import describe_tensors


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def refusal(status_code: int, message: str = "refused") -> ControlReply:
    return ControlReply(id=0, success=False, message=message, status_code=status_code)


def test_the_second_push_registers_and_the_third_goes_by_id(engine: FakeEngine, model: nn.Module) -> None:
    for _ in range(4):
        assert engine.update_weights_from_tensor(model.named_parameters()) == (True, "done")
    assert engine.updates == ["description", "description+", "registration", "registration"]


def test_copies_are_never_registered(engine: FakeEngine, model: nn.Module) -> None:
    for _ in range(4):
        engine.update_weights_from_tensor((n, p.detach().clone()) for n, p in model.named_parameters())
    assert engine.updates == ["description"] * 4
    assert not engine.known


def test_storage_that_moved_is_described_again(engine: FakeEngine, model: nn.Module) -> None:
    for _ in range(3):
        engine.update_weights_from_tensor(model.named_parameters())
    (old,) = engine.known
    model[0].weight.data = torch.ones(4, 4)
    engine.update_weights_from_tensor(model.named_parameters())
    assert engine.updates[-1] == "description"
    assert engine.last.forget == [old]
    assert (read(engine.last.description)["0.weight"] == 1).all()


def test_registered_models(engine: FakeEngine, model: nn.Module) -> None:
    engine.register_weights(model)
    assert isinstance(engine.last, RegisterWeightsReq)
    engine.push_weights(7, mode="in_place")
    assert engine.updates == ["registration"]
    assert (engine.last.weight_version, engine.last.mode) == ("7", "in_place")
    model[1].weight = nn.Parameter(torch.full((4, 4), 3.0))
    engine.push_weights()
    assert engine.updates[-1] == "description+", "a parameter that was replaced must be found"
    assert (read(engine.last.description)["1.weight"] == 3).all()
    model.append(nn.Linear(4, 4))
    engine.push_weights()
    assert "2.weight" in read(engine.last.description), "a module that was added must be found"
    engine.push_weights()
    assert engine.updates[-1] == "registration"
    assert len(engine.known) == 1


def test_registered_functions_and_pairs(engine: FakeEngine, model: nn.Module) -> None:
    engine.register_weights(lambda: model.named_parameters())
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    engine.push_weights()
    assert (read(engine.last.description)["0.weight"] == 1).all()
    engine.register_weights(model.named_parameters())
    engine.push_weights()
    engine.push_weights()
    assert engine.updates[-2:] == ["registration"] * 2


def test_a_server_that_forgot_gets_the_description_once(engine: FakeEngine, model: nn.Module) -> None:
    engine.register_weights(model)
    engine.known.clear()
    assert engine.push_weights()[0]
    assert engine.updates == ["registration", "description+"]
    engine.push_weights()
    assert engine.updates[-1] == "registration"
    engine.refuse = refusal(404, "not here")
    with pytest.raises(WeightUpdateError, match="not here"):
        engine.push_weights()
    assert engine.updates[-2:] == ["registration", "description+"], "the push must not be tried a third time"


def test_pushing_what_was_never_registered(engine: FakeEngine, model: nn.Module) -> None:
    with pytest.raises(BadRequestError, match="register_weights"):
        engine.push_weights()
    engine.unregister_weights()
    engine.register_weights(model)
    engine.unregister_weights()
    with pytest.raises(BadRequestError, match="register_weights"):
        engine.push_weights()
    ((local,),) = [describe_tensors([("w", torch.ones(2))])]
    with pytest.raises(BadRequestError, match="single update"):
        engine.register_weights([local])


def test_unregister_names_everything_that_may_be_open(engine: FakeEngine, model: nn.Module) -> None:
    engine.register_weights(model)
    engine.refuse = ControlTimeoutError("silent")
    other = torch.ones(2)
    with pytest.raises(ControlTimeoutError):
        engine.update_weights_from_tensor([("other", other)])
    with pytest.raises(ControlTimeoutError):
        engine.unregister_weights()
    engine.refuse = None
    engine.unregister_weights()
    assert isinstance(engine.last, UnregisterWeightsReq)
    assert len(engine.last.registrations or []) == 2
    before = len(engine.requests)
    engine.unregister_weights()
    assert len(engine.requests) == before, "no registration is open, so nothing must be sent"


def test_a_refused_push_keeps_the_tensors_and_the_registration(engine: FakeEngine, model: nn.Module) -> None:
    engine.register_weights(model)
    before = [p.detach().clone() for p in model.parameters()]
    engine.refuse = refusal(503, "asleep")
    with pytest.raises(ServerUnavailableError, match="asleep"):
        engine.push_weights()
    engine.refuse = None
    engine.push_weights()
    assert engine.updates[-1] == "registration"
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_an_engine_that_sleeps_holds_nothing(engine: FakeEngine, model: nn.Module) -> None:
    engine.register_weights(model)
    engine.release_memory_occupation(["weights"])
    assert engine._pusher is not None and engine._pusher._registrations.open_ids() == []
    engine.push_weights()
    assert engine.updates[-1] == "description+", "an explicit registration must survive the release of memory"
    engine.release_memory_occupation()
    for _ in range(3):
        engine.update_weights_from_tensor(model.named_parameters())
    assert engine.updates[-3:] == ["description"] * 3, "unregistered memory must not be kept open"


def test_mapping(engine: FakeEngine) -> None:
    fused = nn.Parameter(torch.arange(12.0).reshape(6, 2))

    def mapping(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor | TensorShard]]:
        assert name == "qkv"
        q, k, v = tensor.chunk(3)
        return [("q", q), ("k", k), ("v", TensorShard(v, (2, 2), (0, 0)))]

    for _ in range(3):
        engine.update_weights_from_tensor([("qkv", fused)], mapping=mapping)
    assert engine.updates == ["description", "description+", "registration"], (
        "views of unmoved memory must stay registered"
    )
    seen = read(engine.requests[0].description)  # type: ignore[union-attr, arg-type]
    assert torch.equal(torch.cat([seen["q"], seen["k"], seen["v"]]), fused)
    engine.register_weights([("qkv", fused)], mapping)
    engine.push_weights()
    assert engine.updates[-1] == "registration"


def test_handles_travel_as_they_are(engine: FakeEngine) -> None:
    tensor, other = torch.ones(2), torch.zeros(3)
    described = describe_tensors([("a", tensor)])
    engine.update_weights_from_tensor([*described, ("b", other)])
    assert engine.updates == ["named_tensors"]
    assert engine.last.named_tensors[0] == described[0]
    assert engine.last.named_tensors[1][1].get(0).shape == [3]


@pytest.mark.parametrize("pushed", [{"w": torch.ones(2)}, [torch.ones(2)], [(3, torch.ones(2))], [("w", 3)]])
def test_what_is_no_named_tensor_is_refused(engine: FakeEngine, pushed: Any) -> None:
    with pytest.raises(BadRequestError, match=r"pairs|not a torch.Tensor"):
        engine.update_weights_from_tensor(pushed)
    assert not engine.requests


def test_temporaries_live_until_the_reply(engine: FakeEngine) -> None:
    seen: list[torch.Tensor] = []
    engine.on_request = lambda req: seen.append(read(req.description)["w"])  # type: ignore[union-attr, arg-type]
    engine.update_weights_from_tensor((name, torch.full((1 << 16,), 5.0)) for name in ["w"])
    assert (seen[0] == 5).all()


def test_pushes_of_several_threads_come_one_after_the_other(engine: FakeEngine, model: nn.Module) -> None:
    inside, most, lock = [0], [0], threading.Lock()
    meet = threading.Barrier(4)

    def count(req: Any) -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        threading.Event().wait(0.01)  # time for other pushes to arrive, if they could
        with lock:
            inside[0] -= 1

    engine.on_request = count

    def push() -> None:
        meet.wait(10)
        for _ in range(3):
            engine.update_weights_from_tensor(model.named_parameters())

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(push) for _ in range(4)]:
            job.result(30)
    assert most == [1]
    assert engine.updates == ["description", "description+"] + ["registration"] * 10


def test_every_call_that_takes_a_version_takes_the_same_ones(engine: FakeEngine, model: nn.Module) -> None:
    engine.register_weights(model)
    calls: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda version: engine.update_weights_from_tensor(model.named_parameters(), weight_version=version),
        "push": engine.push_weights,
        "disk": lambda version: engine.update_weights_from_disk("/folder", weight_version=version),
        "distributed": lambda version: engine.update_weights_from_distributed([], [], [], weight_version=version),
        "end": lambda version: engine.end_weight_update(weight_version=version),
        "label": engine.update_weight_version,
    }
    for name, call in calls.items():
        for version, label in (
            ("013@5f2c9a1e", "013@5f2c9a1e"),
            (13, "13"),
            (WeightVersion(13, "5f2c9a1e"), "13@5f2c9a1e"),
        ):
            call(version)
            assert getattr(engine.last, "new_version" if name == "label" else "weight_version") == label, name
        for wrong in (b"13", True, 1.5):
            with pytest.raises(BadRequestError, match="A weight version is a text, an integer or a WeightVersion"):
                call(wrong)
    for nothing in ("", None):
        with pytest.raises(BadRequestError, match="update_weight_version needs a label"):
            calls["label"](nothing)


def test_transactions(engine: FakeEngine, model: nn.Module) -> None:
    transaction = engine.begin_weight_update(lease_seconds=5)
    assert engine.last == BeginWeightUpdateReq(transaction_id=transaction, lease_seconds=5, full=None)
    engine.update_weights_from_tensor(model.named_parameters())
    assert engine.last.transaction_id == transaction
    engine.update_weights_from_distributed(["w"], [torch.bfloat16], [[2]])
    assert isinstance(engine.last, UpdateWeightsFromDistributedReq)
    assert (engine.last.transaction_id, engine.last.dtypes) == (transaction, ["bfloat16"])
    engine.refuse = refusal(400, "missing: 'lm_head.weight'")
    with pytest.raises(WeightUpdateError, match="missing"):
        engine.end_weight_update()
    engine.refuse = None
    engine.update_weights_from_tensor(model.named_parameters())
    assert engine.last.transaction_id == transaction, "a transaction whose end was refused must stay open"
    engine.end_weight_update(weight_version="9")
    assert engine.last == EndWeightUpdateReq(transaction_id=transaction, weight_version="9", partial=False)
    transaction = engine.begin_weight_update(full=False)
    assert engine.last.full is False
    engine.end_weight_update(partial=True)
    assert engine.last == EndWeightUpdateReq(transaction_id=transaction, partial=True)
    engine.update_weights_from_tensor(model.named_parameters())
    assert engine.last.transaction_id is None


def test_a_transaction_that_the_server_does_not_have_is_left(engine: FakeEngine, model: nn.Module) -> None:
    """After the lease has ended or the server was restarted, the engine must stop sending the transaction's id."""
    pushes: list[Callable[[], Any]] = [
        lambda: engine.update_weights_from_tensor(model.named_parameters()),
        lambda: engine.update_weights_from_disk("/checkpoint"),
        lambda: engine.update_weights_from_distributed(["w"], ["bfloat16"], [[2]]),
        lambda: engine.push_weights(),  # by id
    ]
    engine.register_weights(model)
    for push in pushes:
        transaction = engine.begin_weight_update()
        push()
        assert engine.last.transaction_id == transaction
        engine.refuse = refusal(409, f"The weight-update transaction '{transaction}' is not open.")
        with pytest.raises(UpdateConflictError, match=r"is not open\. This engine has left the transaction"):
            push()
        engine.refuse = None
        push()
        assert engine.last.transaction_id is None


def test_only_a_conflict_about_its_own_transaction_makes_an_engine_leave_it(
    engine: FakeEngine, model: nn.Module
) -> None:
    transaction = engine.begin_weight_update()
    for status, named in ((409, "another"), (400, None), (500, None), (503, None), (504, None)):
        engine.refuse = refusal(status)
        with pytest.raises(VerlServerError) as caught:
            engine.update_weights_from_tensor(model.named_parameters(), transaction_id=named)
        assert "has left" not in str(caught.value)
    with pytest.raises(VerlServerError):
        engine.register_weights(model)
    engine.refuse = None
    engine.update_weights_from_tensor(model.named_parameters())
    assert engine.last.transaction_id == transaction


def interrupt(req: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_end_is_not_waited_for(engine: FakeEngine, model: nn.Module) -> None:
    """The server ends the transaction although the caller was interrupted."""
    engine.begin_weight_update()
    engine.on_request = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.end_weight_update()
    engine.on_request = lambda req: None
    engine.update_weights_from_tensor(model.named_parameters())
    assert engine.last.transaction_id is None


def test_an_interrupted_push_says_what_is_certain_and_the_next_starts_anew(
    engine: FakeEngine, model: nn.Module
) -> None:
    engine.register_weights(model)
    engine.push_weights()
    engine.on_request = interrupt
    temporary = torch.ones(3)
    pushes: list[Callable[[], Any]] = [
        lambda: engine.push_weights(),
        lambda: engine.update_weights_from_tensor([("w", temporary)]),
        lambda: engine.update_weights_from_tensor(describe_tensors([("w", temporary)])),
    ]
    for push in pushes:
        with pytest.raises(KeyboardInterrupt) as caught:
            push()
        assert "without the server's answer" in caught.value.__notes__[0]
    assert engine._pusher is not None and len(engine._pusher._registrations.open_ids()) == 2, "both may be open"
    engine.on_request = lambda req: None
    assert engine.push_weights() == (True, "done")
    assert len(engine._pusher._registrations.open_ids()) == 1


@pytest.mark.parametrize(
    ("error", "is_certain"),
    [
        (ControlTimeoutError("It waited for its turn. The weights are unchanged."), True),
        (WeightUpdateError("no such parameter"), True),
        (UnansweredError("silent"), False),
        (ServerDiedError("the connection broke"), False),
    ],
)
def test_only_what_the_server_did_not_answer_is_uncertain(
    engine: FakeEngine, model: nn.Module, error: Exception, is_certain: bool
) -> None:
    engine.refuse = error
    with pytest.raises(type(error)) as caught:
        engine.update_weights_from_tensor(model.named_parameters())
    assert bool(getattr(caught.value, "__notes__", [])) != is_certain


def test_a_transaction_that_was_given_up_is_not_ours_any_more(engine: FakeEngine, model: nn.Module) -> None:
    engine.begin_weight_update("mine")
    engine.refuse = refusal(409, "another transaction is open")
    with pytest.raises(WeightUpdateError):
        engine.end_weight_update()
    engine.refuse = None
    engine.update_weights_from_tensor(model.named_parameters())
    assert engine.last.transaction_id is None
