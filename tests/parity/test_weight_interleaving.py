"""Pushes of every kind between generations, pauses, flushes, sleeps and faults, at random.

A real engine with a prefix cache serves requests, which share prefixes, come in groups, continue earlier replies, or
are aborted. A quarter of them is greedy, the others mix all sampling settings (see `mixed_requests`). Every token of
every reply is computed again with transformers, under the versions that the reply names (see `span_judge` and
`sampling_judge`). The test suite plays a few seeds under each scheduling policy, with a large and with a small KV pool.
This command plays many seeds, one after the other, and prints a line for each:

    python -m tests.parity.test_weight_interleaving --seeds 50 [--first 0] [--turns 60] [--switches fcfs-small]
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.depth import at_depth
from tests.parity.harness import random_prompt
from tests.parity.mixed_requests import MixedRequest, greedy_request, mixed_request
from tests.parity.sampling_judge import Found, SamplingJudge
from tests.parity.span_judge import Fate, SpanJudge, Version, Weights
from verl_server import BadRequestError, Engine, ServerUnavailableError, WeightUpdateError
from verl_server.models.tiny import make_model_folder

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "cpu_threads": 1,
    "page_size": 8,
    "chunked_prefill_size": 48,
    "max_total_tokens": 4096,
    "check_invariants": True,
    "log_level": "warning",
}
SWITCHES: dict[str, dict[str, Any]] = {
    "lpm-large": {},
    "fcfs-small": {"schedule_policy": "fcfs", "max_total_tokens": 176, "fused_kernels": False},
    "lpm-small": {"max_total_tokens": 176},
    "fcfs-large": {"schedule_policy": "fcfs"},
    "lpm-small-plain": {"max_total_tokens": 176, "fused_kernels": False},
}
"""Settings by name. A small KV pool retracts requests."""
MODES: dict[str, Fate] = {"wait": "ended", "in_place": "kept", "retract": "recomputed", "abort": "ended"}
BOUND = 30.0
"""Seconds within which every call must be answered."""


@dataclass
class _Asked:
    requests: list[MixedRequest]
    answer: Future[Any]
    refusals: int
    """The number of times that generation had been refused before this request."""


class Player:
    """A trainer and clients, driven by one seed. Control calls follow each other, generations run beside them."""

    def __init__(self, engine: Engine, judge: SpanJudge, base: Weights, seed: int) -> None:
        self.engine, self.judge, self.rng = engine, judge, random.Random(seed)
        self._noise = torch.Generator().manual_seed(seed)
        self.master = {name: tensor.clone() for name, tensor in base.items()}
        """The trainer's own tensors, which are registered."""
        self._base, self.served = base, dict(base)
        self._longest = min(200, engine.get_server_info()["max_total_num_tokens"] - 90)
        """Most tokens of an earlier reply with which a prompt begins."""
        self._threads = ThreadPoolExecutor(32)
        self._asked: list[_Asked] = []
        self._turns = 0
        self._ended: list[list[int]] = []
        """The tokens of replies with their prompts, which later requests continue."""
        self.paused = False
        self.refusals = 0
        self.refusing = False
        self.counts = dict.fromkeys(
            ["pushes", "replies", "aborted", "refused", "refused pushes", "cached", "retracted"], 0
        )
        self.engine.register_weights(list(self.master.items()))
        self._full_push("wait")

    # -- versions ------------------------------------------------------------------------------------------------

    def _label(self) -> str:
        return str(len(self.judge.versions) + 1)

    def _note(self, label: str, brings: Weights, mode: str, held: bool = False) -> None:
        """Record a version whose weights are the served ones with the pushed tensors replaced."""
        self.served = self.served | {name: tensor.clone() for name, tensor in brings.items()}
        fate: Fate = "kept" if self.paused or held else MODES[mode]
        self.judge.versions[label] = Version(self.served, fate)
        self.counts["pushes"] += 1

    def _new(self, names: list[str] | None = None) -> Weights:
        """Return the checkpoint's tensors with new noise.

        Noise is not accumulated, because float32 would not resolve the logits to 1e-4.
        """
        names = names or list(self._base)
        noise = {name: torch.randn(self._base[name].shape, generator=self._noise) for name in names}
        return {name: self._base[name] + 0.2 * noise[name] for name in names}

    def _some(self) -> list[str]:
        return self.rng.sample(list(self.served), self.rng.randint(1, len(self.served)))

    def _mode(self) -> Any:
        return self.rng.choices(list(MODES), [1, 4, 3, 1])[0]

    # -- turns ---------------------------------------------------------------------------------------------------

    def play(self, turns: int) -> None:
        kinds = {
            self.ask: 5,
            self.ask_together: 4,
            self.tick: 6,
            self.push_registered: 4,
            self.push_once: 3,
            self.push_some: 2,
            self.transaction: 2,
            self.fail: 2,
            self.pause: 2,
            self.abort: 1,
            self.flush: 1,
            self.sleep: 1,
            self.tear: 0.5,
            self.spoil: 0.5,
        }
        for _ in range(turns):
            self.rng.choices(list(kinds), list(kinds.values()))[0]()
            self._judge_answered()

    def ask(self) -> None:
        """Send a request or a group of requests: new, with a shared beginning, or continuing an earlier reply."""
        rng = self.rng
        self._turns += 1
        beginning = random_prompt(rng.choice([8, 24, 40]), rng.randrange(4))
        if self._ended and rng.random() < 0.3:
            beginning = rng.choice(self._ended)[: self._longest]
        prompt = beginning + random_prompt(rng.randint(1, 30), 1000 + self._turns)
        group = rng.choice([1, 1, 1, 3])
        if rng.random() < 0.25:
            start = 0 if rng.random() < 0.2 else -1
            request = greedy_request(prompt, rng.randint(1, 48), start=start)
            requests = [request] * group
        else:
            request = mixed_request(rng, prompt, 48)
            requests = [request.sample(k) for k in range(group)]
        body = request.body() | {"timeout": BOUND}
        body["sampling_params"] = request.params | {"n": group}
        if group == 1:
            body["rid"] = f"r{self._turns}"
        answer = self._threads.submit(self.engine.generate, **body)
        self._asked.append(_Asked(requests, answer, self.refusals))

    def ask_together(self) -> None:
        """Send requests that run at the same time."""
        for _ in range(self.rng.randint(2, 5)):
            self.ask()

    def tick(self) -> None:
        """Let a few steps pass, as many as a short request takes."""
        if not self.paused:
            self.ask_now(self.rng.randint(1, 5))

    def ask_now(self, tokens: int) -> None:
        request = greedy_request(random_prompt(4, 7), tokens)
        self._judge(request, self.engine.generate(**request.body(), timeout=BOUND))

    def push_registered(self) -> None:
        for name, tensor in self._new().items():
            self.master[name].copy_(tensor)
        label, mode = self._label(), self._mode()
        self.engine.push_weights(label, mode=mode)
        self._note(label, self.master, mode)

    def push_once(self) -> None:
        self._full_push(self._mode())

    def _full_push(self, mode: Any) -> None:
        new, label = self._new(), self._label()
        self.engine.update_weights_from_tensor(new.items(), weight_version=label, mode=mode, partial=False)
        self._note(label, new, mode)

    def push_some(self) -> None:
        new, label, mode = self._new(self._some()), self._label(), self._mode()
        self.engine.update_weights_from_tensor(new.items(), weight_version=label, mode=mode, partial=True)
        self._note(label, new, mode)

    def transaction(self) -> None:
        mode = self.rng.choice(["wait", "in_place", "retract"])
        self.engine.begin_weight_update(full=self.rng.choice([None, True, False]), mode=mode)  # type: ignore[arg-type]
        self.ask()
        brings: Weights = {}
        for _ in range(self.rng.randint(0, 3)):
            new = self._new(self._some())
            self.engine.update_weights_from_tensor(new.items())
            brings |= new
            if self.rng.random() < 0.3:
                self.flush()
        label = self._label()
        if self.rng.random() < 0.2:
            self.engine.end_weight_update(discard=True)
            if brings:
                self._heal()
            return
        try:
            self.engine.end_weight_update(weight_version=label, partial=self.rng.random() < 0.4)
        except WeightUpdateError:
            rest = self._new([name for name in self.served if name not in brings])
            self.engine.update_weights_from_tensor(rest.items())
            self.engine.end_weight_update(weight_version=label)
            brings |= rest
        self._note(label, brings, mode)

    def fail(self) -> None:
        """Push something that is refused, which must change nothing."""
        first = next(iter(self.served))
        wrong: list[dict[str, Any]] = [
            {"named_tensors": [("no.such.weight", torch.ones(4))]},
            {"named_tensors": [(first, torch.ones(3, 3))]},
            {"named_tensors": [(first, torch.ones(self.served[first].shape, dtype=torch.int64))]},
            {"named_tensors": list(self._new([first]).items())},
            {"named_tensors": list(self._new([first]).items()), "checksums": {first: "0" * 64}},
            {"named_tensors": list(self._new().items()), "transaction_id": "nobody's"},
        ]
        with pytest.raises(WeightUpdateError):
            self.engine.update_weights_from_tensor(**self.rng.choice(wrong), mode=self._mode())
        self.counts["refused pushes"] += 1

    def pause(self) -> None:
        """Pause generation for some turns."""
        self.engine.pause_generation(self.rng.choice(["abort", "retract", "in_place"]))
        self.paused = True
        inside = [
            self.ask,
            self.push_registered,
            self.push_once,
            self.push_some,
            self.fail,
            self.flush,
            self.transaction,
        ]
        for _ in range(self.rng.randint(0, 4)):
            self.rng.choice(inside)()
        self.paused = False
        self.engine.continue_generation()

    def abort(self) -> None:
        self.engine.abort_request(f"r{self._turns}", abort_all=self.rng.random() < 0.2)

    def flush(self) -> None:
        self.engine.flush_cache()

    def sleep(self) -> None:
        """Release and resume memory.

        The release is refused while requests run. Requests that wait during a pause survive it.
        """
        tags = self.rng.choice([None, ["weights"], ["kv_cache"]])
        if survive := self.rng.random() < 0.5:
            self.engine.pause_generation(self.rng.choice(["abort", "retract"]))
            self.paused = True
            self.ask()
        runs = any(not asked.answer.done() for asked in self._asked)
        try:
            self.engine.release_memory_occupation(tags)
        except BadRequestError:
            assert not survive and runs
            return
        self.refusing = not survive
        self.refusals += self.refusing
        if self.rng.random() < 0.5:
            self.ask()
        if tags != ["kv_cache"]:
            with pytest.raises(WeightUpdateError):
                self.engine.push_weights()
        self.engine.resume_memory_occupation(tags)
        if tags != ["kv_cache"]:
            self._full_push("in_place")
        self._answer_refused()
        self.refusing = self.paused = False
        if survive:
            self.engine.continue_generation()

    def tear(self) -> None:
        self.engine.weights_checker("reset_tensors")
        self._heal()

    def spoil(self) -> None:
        """Push one NaN or infinity. The push is refused after the copy, and no token is computed from it."""
        new = self._new(self._some())
        name = self.rng.choice(list(new))
        values = new[name].view(-1)
        values[self.rng.randrange(len(values))] = self.rng.choice([float("nan"), float("inf"), -float("inf")])
        with pytest.raises(WeightUpdateError, match=f"NaN or infinity in 1 of {len(new)} tensors: {name}"):
            self.engine.update_weights_from_tensor(new.items(), mode=self._mode(), partial=True)
        self._heal()

    def _heal(self) -> None:
        """Assert that torn weights refuse generation, and push all weights."""
        self.refusals += 1
        self.refusing = True
        if not self.paused:
            with pytest.raises(ServerUnavailableError):
                self.ask_now(1)
        self._full_push("in_place")
        self._answer_refused()
        self.refusing = False

    # -- answers -------------------------------------------------------------------------------------------------

    def _answer_refused(self) -> None:
        """Wait for the answers to requests that were sent while generation is refused."""
        if self.paused:
            return
        for asked in self._asked:
            if asked.refusals == self.refusals:
                asked.answer.exception(BOUND)
        self._judge_answered()

    def settle(self) -> None:
        """Wait until every request has its one answer."""
        for asked in self._asked:
            asked.answer.exception(BOUND)
        self._judge_answered()
        assert not self._asked
        self.ask_now(8)
        self.engine.unregister_weights()
        self._threads.shutdown()

    def _judge_answered(self) -> None:
        for asked in [asked for asked in self._asked if asked.answer.done()]:
            self._asked.remove(asked)
            error = asked.answer.exception()
            if error is not None:
                assert isinstance(error, ServerUnavailableError), repr(error)
                assert self.refusing or self.refusals > asked.refusals, f"refused without a reason: {error}"
                self.counts["refused"] += 1
                continue
            replies = asked.answer.result()
            replies = replies if isinstance(replies, list) else [replies]
            for request, reply in zip(asked.requests, replies, strict=True):
                self._judge(request, reply)

    def _judge(self, request: MixedRequest, reply: dict[str, Any]) -> None:
        meta = reply["meta_info"]
        is_aborted = meta["finish_reason"]["type"] == "abort"
        assert not is_aborted or meta["finish_reason"]["status_code"] is None, meta["finish_reason"]
        self.counts["aborted" if is_aborted else "replies"] += 1
        self.counts["cached"] += meta["cached_tokens"] > 0
        self.counts["retracted"] += meta["num_retractions"] > 0
        judge = SamplingJudge(request, Found.in_reply(reply))
        judge.check_shape()
        self.judge.check(request.prompt, reply, judge)
        self._ended.append(request.prompt + reply["output_ids"])


def play(engine: Engine, folder: Path, seed: int, turns: int) -> dict[str, int]:
    """Play one seed to its end and return counts of what happened. Raise AssertionError at the first wrong token."""
    judge = SpanJudge(folder)
    base = {name: tensor.detach().clone() for name, tensor in judge._model.state_dict().items()}
    player = Player(engine, judge, base, seed)
    try:
        player.play(turns)
        player.settle()
    except BaseException:
        engine.abort_request(abort_all=True)
        player._threads.shutdown(wait=False, cancel_futures=True)
        raise
    return player.counts | {"tokens": judge.judged, "over versions": judge.mixed}


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(model_path=str(tiny_llama), **(SETTINGS | SWITCHES[request.param])) as engine:
        yield engine


@pytest.mark.parametrize("seed", at_depth([1, 2, 3, 4]))
@pytest.mark.parametrize("engine", at_depth(SWITCHES, quick=2), indirect=True)
def test_every_token_is_what_its_version_computes(engine: Engine, tiny_llama: Path, seed: int) -> None:
    counts = play(engine, tiny_llama, seed, 60)
    assert counts["replies"] > 10 and counts["pushes"] > 10 and counts["tokens"] > 100, counts
    assert counts["cached"], "the prefix cache was not used"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--turns", type=int, default=60, help="of each")
    parser.add_argument("--switches", choices=SWITCHES, default="lpm-large", help="settings of the engine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="verl-interleaving-") as name:
        folder = make_model_folder(name, "llama")
        with Engine(model_path=str(folder), **(SETTINGS | SWITCHES[options.switches])) as engine:
            for seed in range(options.first, options.first + options.seeds):
                print(seed, play(engine, folder, seed, options.turns), flush=True)


if __name__ == "__main__":
    main()
