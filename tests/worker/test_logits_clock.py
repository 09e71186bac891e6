"""`LogitsClock`: when a host stops waiting for masks. A fake device and a fake time, in milliseconds."""

from __future__ import annotations

from collections.abc import Callable

from verl_server.worker.logits_clock import LogitsClock


class FakeDevice:
    """Computes forward passes of a fixed duration, each after the step before was read."""

    def __init__(self, duration: float = 10.0) -> None:
        self.now, self.duration = 0.0, duration
        self.marks: list[float] = []
        """Times at which the events are reached, in the order of their records."""
        self.clock = LogitsClock(lambda: FakeEvent(self), lambda: self.now / 1e3)

    def launch(self, tokens: int = 256) -> Callable[[], bool]:
        """Launch a forward pass that begins now."""
        self.marks += [self.now, self.now + self.duration]
        begin = self.clock.forward_begins()
        is_due = self.clock.forward_launched(begin, tokens)
        self.clock.step_read()
        return is_due

    def wait(self, is_due: Callable[[], bool]) -> float:
        """Return the time at which a forward pass that begins now is due."""
        start = self.now
        while not is_due():
            self.now += 0.25
            assert self.now < start + 100
        return self.now - start


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device, self._at = device, -1.0

    def record(self) -> None:
        self._at = self._device.marks.pop(0)

    def query(self) -> bool:
        return self._device.now >= self._at

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return end_event._at - self._at


def test_the_first_steps_are_due_when_their_logits_are_computed() -> None:
    device = FakeDevice()
    assert device.wait(device.launch()) == 10.0
    assert device.wait(device.launch()) == 10.0


def test_a_wait_ends_earlier_by_the_time_that_the_launches_take() -> None:
    device = FakeDevice()
    waits = []
    for _ in range(60):
        waits.append(device.wait(device.launch()))
        device.now += 2.0  # sampling and the next forward pass are launched
    assert waits[0] == 10.0 and sorted(waits, reverse=True) == waits and waits[-1] == 8.25
    device.duration = 5.0
    assert device.wait(device.launch()) == 5.0, "the logits are computed before they were expected"


def test_a_forward_pass_of_another_size_is_not_predicted() -> None:
    device = FakeDevice()
    for _ in range(60):
        device.wait(device.launch())
        device.now += 2.0
    device.duration = 30.0
    assert device.wait(device.launch(tokens=2048)) == 30.0
    device.now += 2.0
    assert device.wait(device.launch(tokens=2000)) < 29.0, "two sizes that are nearly the same"


def test_long_pauses_and_steps_without_masks_do_not_count_as_launches() -> None:
    device = FakeDevice()
    for _ in range(5):
        device.wait(device.launch())
        device.now += 50.0
    assert device.wait(device.launch()) == 10.0
    for _ in range(5):
        device.wait(device.launch())
        device.now += 2.0
        device.clock.forget()
    assert device.wait(device.launch()) == 10.0
