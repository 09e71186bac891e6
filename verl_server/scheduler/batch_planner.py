"""`BatchPlanner`: decides which requests run in the next step, and on which pages.

It owns the waiting and running lists, the KV pages, the page-table rows and the prefix cache. It is pure Python without
tensors or I/O. The `Scheduler` adds and removes requests. The `StepPipeline` plans a `ScheduleBatch`, launches it, and
reports that it was collected. One step may be in flight while the next is planned. Pages and rows that the step in
flight still writes may be assigned again, because the device runs steps in order.

Policy: every running request decodes in every step. Prefills fill the rest of the step, oldest first, with at most
`chunked_prefill_size` prompt tokens. Then `Admission` decides which waiting requests start. `ExpectedReturn` learns how
long the prefix cache should keep the history of a turn. If pages run out, the newest request is retracted: it keeps its
tokens, loses its KV, and is computed again later. The oldest request always fits (this is checked at arrival), so there
is always progress. A step reports a bounded number of log-probabilities of prompt tokens, so that a prompt with
hundreds of candidates for each token does not delay the tokens of other requests. If a step runs out of memory
nevertheless, steps become smaller (`StepLimits`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

from verl_server.scheduler.admission import Admission
from verl_server.scheduler.cache.expected_return import ExpectedReturn
from verl_server.scheduler.cache.free_lists import PagePool, PageTableRows
from verl_server.scheduler.cache.page_node import PageNode
from verl_server.scheduler.cache.radix_cache import RadixCache
from verl_server.scheduler.schedule_batch import Req, ScheduleBatch
from verl_server.scheduler.session_histories import SessionHistories
from verl_server.scheduler.step_limits import StepLimits
from verl_server.scheduler.waiting_queue import SchedulePolicy, WaitingQueue

_MOST_REPORTED = 16384  # bound on the log-probabilities of prompt tokens in a step: all other requests wait for them


class BatchPlanner:
    """State and policy of continuous batching. The module docstring describes the policy."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_rows: int,
        chunked_prefill_size: int,
        disable_radix_cache: bool = False,
        step_budget: int | None = None,
        schedule_policy: SchedulePolicy = "lpm",
        max_age: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`step_budget`: see `Admission`. `schedule_policy`, `max_age`: see `WaitingQueue`. `clock` returns seconds."""
        self.page_size = page_size
        self.limits = StepLimits(max_rows, chunked_prefill_size)
        self.pages = PagePool(num_pages)
        self.rows = PageTableRows(max_rows)
        self.returns = ExpectedReturn()
        """Decides how long the history of a turn is kept."""
        self.cache = RadixCache(self.pages, page_size, disable_radix_cache, self.returns)
        self.waiting = WaitingQueue(self.cache, schedule_policy, max_age, clock)
        self.admission = Admission(self.waiting, self.cache, step_budget, clock)
        self._histories = SessionHistories(self.cache, self.returns)
        self._clock = clock
        self.running: list[Req] = []
        self.num_retractions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._reported_room = _MOST_REPORTED
        """Log-probabilities of prompt tokens that the step being planned may still report."""
        self._num_retracted = 0
        """Number of waiting requests that were retracted."""

    # -- requests in and out ---------------------------------------------------------------------------------

    def max_tokens(self) -> int:
        """Return the capacity of the pool in tokens."""
        return self.pages.num_pages * self.page_size

    def add(self, req: Req) -> None:
        """Queue a request."""
        self.waiting.match(req)
        if not req.started:
            self._histories.begin_turn(req, self._clock())
        self.waiting.add(req)

    def finish_session(self, session_id: str) -> None:
        """Record that no later request will continue the session.

        No request will continue the session's requests that still wait or run, either.
        """
        self._histories.finish(session_id)
        for req in itertools.chain(self.running, self.waiting):
            req.session_over = req.session_over or req.session_id == session_id

    def remove(self, req: Req, *, cache: bool = True) -> None:
        """Remove a waiting or running request. `cache=False` keeps its newest pages out of the prefix cache."""
        if req.row < 0:
            self.waiting.remove(req)
            self._num_retracted -= req.started
            return
        self.running.remove(req)
        self._free(req, cache)

    def remove_finished(self, finished: list[tuple[Req, bool]]) -> None:
        """Call `remove` for many running requests, each with its `cache` flag, in one pass over the running list."""
        for req, cache in finished:
            self._free(req, cache)
        if finished:
            self.running = [req for req in self.running if req.row >= 0]

    def retract(self, req: Req) -> None:
        """Put a running request back into the queue without KV. It keeps its tokens and log-probabilities.

        No step of the request may be in flight: otherwise the token of that step would be mistaken for a token that the
        request samples after it starts again.
        """
        assert req.cached_len == req.sound_len, f"{req.rid} is retracted while a step with it is in flight"
        self.running.remove(req)
        self._free(req, cache=True, ended=False)
        req.private = False
        if req.prompt_logprobs is not None:
            req.prompt_logprobs.clear()
        req.num_retractions += 1
        self.num_retractions += 1
        self._num_retracted += 1
        self.add(req)

    def retract_all(self) -> None:
        """Retract all running requests for an update or a pause."""
        for req in list(self.running):
            self.retract(req)
            req.restarted = True

    def is_restarting(self) -> bool:
        """Return True if a running request still recomputes the KV that an update dropped."""
        return any(req.restarted for req in self.running)

    @property
    def num_retracted(self) -> int:
        """Number of waiting requests that were retracted."""
        return self._num_retracted

    def has_started(self) -> bool:
        """Return True if any request was started and has not ended. Retracted requests count."""
        return bool(self.running) or self._num_retracted > 0

    def start_version(self) -> None:
        """Start a new version of the prefix cache after the weights changed. Old pages stay with their requests only.

        An unfinished prefill starts again, because the log-probabilities of a prompt and the next token must have the
        same version.
        """
        for req in [req for req in self.running if req.prefilling]:
            self.retract(req)
            req.restarted = True
        self.cache.start_version()
        self.waiting.start_version()
        for req in self.running:
            req.private = True

    def flush_cache(self) -> None:
        """Empty the prefix cache for all requests that start from now on. Called while none runs."""
        self.cache.start_version()

    # -- a step ----------------------------------------------------------------------------------------------

    def plan(self, only_started: bool = False, settled: bool = True) -> ScheduleBatch | None:
        """Return the next step, which must be launched at once, or None if there is nothing to run.

        `only_started` admits no request that was not started before (a drain). `settled` is False while a step is in
        flight. Then no request is retracted, and None may mean that a request must be retracted: collect the step, and
        plan again.
        """
        retracted = False
        while True:
            decodes, growing, prefills = self._split_running()
            if self.limits.are_active:
                chosen = self.limits.choose(decodes + prefills)
                decodes, growing, prefills = (
                    [req for req in reqs if req in chosen] for reqs in (decodes, growing, prefills)
                )
            if len(growing) <= self.cache.available_pages():
                for req in growing:
                    self._grow(req, 1)
                admit = bool(self.waiting) and not retracted and not self.limits.has_suspects
                room = self.limits.rows - len(decodes)
                if reqs := decodes + self._plan_prefills(prefills, room, admit, only_started):
                    self.admission.reserve.step_planned(retracted)
                    return ScheduleBatch.build(reqs)
                if not self.running:
                    return None
            # Decodes lack pages, or prefills hold all pages: the newest request makes room for the others.
            if not settled:
                return None
            self.retract(max(self.running, key=_arrival))
            retracted = True

    def plan_ahead(self, only_started: bool) -> ScheduleBatch | None:
        """Return the next step before it can be launched, or None if `plan` must plan it.

        The step is the one that `plan` returns now with `settled=False`, and it only decodes: no request may be
        admitted, no prefill continues, and pages suffice. So `ScheduleBatch.undo` reverses it. Before its launch,
        `confirm` says whether it is still the next step.
        """
        if self.limits.are_active or self._may_admit(only_started):
            return None
        decodes, growing, prefills = self._split_running()
        if not decodes or prefills or len(growing) > self.cache.available_pages():
            return None
        for req in growing:
            self._grow(req, 1)
        return ScheduleBatch.build(decodes)

    def confirm(self, planned: ScheduleBatch, only_started: bool) -> bool:
        """Return True if the result of `plan_ahead` is still the next step, which must be launched at once then."""
        if self._may_admit(only_started) or any([req.row < 0 for req in planned.reqs]):
            return False
        self.admission.reserve.step_planned(retracted=False)
        return True

    def collected(self, batch: ScheduleBatch) -> list[Req]:
        """Record that the step was computed. Return the requests whose prefill it continued, for `share`."""
        self.limits.succeeded(batch)
        for req, extend_len in zip(batch.reqs, batch.forward.extend_lens, strict=True):
            req.sound_len += extend_len - (req in batch.left_out)
        prefilled = [req for req in batch.prefills if req.row >= 0 and req.prefilling]
        for req in prefilled:
            req.prefilling = req.sound_len < len(req.token_ids)
            req.restarted = req.restarted and req.prefilling
        return prefilled

    def out_of_memory(self, batch: ScheduleBatch) -> Req | None:
        """Undo a step that ran out of memory at its launch. Its requests are planned again in smaller steps.

        Return the request that must end because it cannot be computed even alone, or None if it is not known yet.
        """
        batch.undo()
        return self.limits.failed(batch)

    def share(self, reqs: list[Req]) -> None:
        """Move full pages into the prefix cache, for each request of `reqs` that still runs."""
        for req in reqs:
            if req.row >= 0:
                self._share(req)

    def _split_running(self) -> tuple[list[Req], list[Req], list[Req]]:
        """Return (requests that decode, decodes that need a new page, requests whose prefill continues).

        A request whose last token is pending is in none of the lists.
        """
        size = self.page_size
        decodes, growing, prefills = [], [], []
        for req in self.running:
            cached_len = req.cached_len
            if cached_len >= req.compute_len:
                continue
            if len(req.token_ids) + req.num_pending - cached_len == 1:
                if cached_len == len(req.pages) * size:
                    growing.append(req)
                req.device_len = cached_len + 1
                decodes.append(req)
            else:
                prefills.append(req)
        return decodes, growing, prefills

    def _plan_prefills(self, prefills: list[Req], room: int, admit: bool, only_started: bool) -> list[Req]:
        """Return up to `room` requests that fill the step.

        These are `prefills`, oldest first, and then, with `admit`, waiting requests.
        """
        budget = self.limits.tokens
        self._reported_room = _MOST_REPORTED
        prefills.sort(key=_arrival)
        chunks = []
        for req in prefills:
            if took := self._take_chunk(req, budget):
                budget -= took
                chunks.append(req)
        return chunks + self._admit(budget, room - len(chunks), only_started) if admit else chunks

    def _take_chunk(self, req: Req, budget: int) -> int:
        """Plan the next chunk of a prefill, as long as `budget` and pages allow. Return the length in tokens."""
        room = (len(req.pages) + self.cache.available_pages()) * self.page_size - req.cached_len
        chunk = min(budget, len(req.token_ids) - req.cached_len, room, self._reportable_tokens(req))
        if chunk <= 0:
            return 0
        if req.prompt_logprobs is not None:
            self._reported_room -= req.prompt_logprobs.num_reported(req.cached_len, chunk)
        req.device_len = req.cached_len + chunk
        self._grow(req, self._num_pages(req.device_len) - len(req.pages))
        return chunk

    def _reportable_tokens(self, req: Req) -> int:
        """Return how many of the request's next tokens this step may compute within `_MOST_REPORTED`.

        The number is at least one for the first request with prompt log-probabilities in a step, even if one token
        exceeds `_MOST_REPORTED`. Otherwise the request would wait for ever.
        """
        prompt = req.prompt_logprobs
        if prompt is None:
            return self.max_tokens()
        first = self._reported_room == _MOST_REPORTED
        reported = max(int(first), self._reported_room // prompt.per_token)
        return max(0, prompt.start - req.cached_len) + reported if reported else 0

    def _admit(self, budget: int, room: int, only_started: bool) -> list[Req]:
        """Start up to `room` waiting requests while budget and rows suffice. Return the started requests."""
        admitted: list[Req] = []
        if budget <= 0 or room <= 0 or not self._may_admit(only_started):
            return admitted
        for req, node in self.admission.admitted(self.running, only_started, self._reportable_tokens):
            self._start(req, node)
            budget -= self._take_chunk(req, budget)
            admitted.append(req)
            if budget <= 0 or len(admitted) >= room or not self.rows.available:
                break
        return admitted

    def _may_admit(self, only_started: bool) -> bool:
        """Return False if the next step cannot start any waiting request."""
        return bool(self.waiting) and self.rows.available > 0 and (not only_started or self._num_retracted > 0)

    def _start(self, req: Req, node: PageNode) -> None:
        """Assign a row, and the cached pages from the root to `node`, to a waiting request."""
        self.cache.lock(node)
        self.waiting.remove(req)
        req.row = self.rows.alloc()
        self.admission.step_bytes += req.step_bytes
        req.node = node
        req.pages = self.cache.path_pages(node)
        req.cached_len = req.sound_len = node.depth * self.page_size
        if req.pages:
            req.page_updates = [(0, list(req.pages))]
        req.prefilling = True
        if req.started:
            self._num_retracted -= 1
        else:
            req.started = True
            req.cached_tokens = min(req.cached_len, len(req.prompt_ids))
            self.num_prompt_tokens += len(req.prompt_ids)
            self.num_cached_tokens += req.cached_tokens
        self.running.append(req)

    # -- pages -----------------------------------------------------------------------------------------------

    def num_used_tokens(self) -> int:
        """Return the capacity in tokens that running requests hold."""
        return (self.pages.num_pages - self.cache.available_pages()) * self.page_size

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _grow(self, req: Req, count: int) -> None:
        if count <= 0:
            return
        short = count - self.pages.available
        if short > 0:
            self.cache.kept.expire(self._clock())
            kept = self.cache.kept.count
            self.cache.evict(short)
            if not self._num_retracted:  # otherwise these are pages of retracted requests, which wait for them
                self.admission.headroom.lost(min(short, kept - self.cache.kept.count))
        taken = self.pages.alloc(count)
        req.page_updates.append((len(req.pages), taken))
        req.pages += taken

    def _share(self, req: Req) -> None:
        """Move the full pages of a request into the prefix cache. The request continues to hold them."""
        count = req.sound_len // self.page_size
        node = req.node
        if self.cache.disabled or req.private or node is None or count <= node.depth:
            return
        req.node, swapped = self.cache.extend(node, req.token_ids, req.pages, count)
        for index, page in swapped:
            req.pages[index] = page
            req.page_updates.append((index, [page]))

    def _free(self, req: Req, cache: bool, ended: bool = True) -> None:
        """Free row and pages of a running request. `ended` is False if the request will run again."""
        assert req.node is not None
        if cache:
            self._share(req)
        self.pages.free(req.pages[req.num_shared :])
        now = keep_until = self._clock()
        self.cache.kept.expire(now)
        if ended:
            self.admission.headroom.turn_ended()
            keep_until = self._histories.end_turn(req, req.node, now)
        self.cache.unlock(req.node, keep_until if self.waiting.by_prefix else 0.0)
        if ended and req.session_over:
            self.cache.finish(req.node)
        self.rows.free(req.row)
        self.admission.step_bytes -= req.step_bytes
        req.row, req.node, req.pages, req.page_updates = -1, None, [], []
        req.cached_len = req.device_len = req.sound_len = req.num_pending = 0
        req.prefilling = False

    def check_invariants(self, deep: bool = True) -> None:
        """Assert that free + cached + used == total. With `deep`, also check the owner of each page, lock and row."""
        used = sum(len(req.pages) - req.num_shared for req in self.running)
        free, cached = self.pages.available, self.cache.num_pages
        assert free + cached + used == self.pages.num_pages, f"{free=} + {cached=} + {used=} != {self.pages.num_pages}"
        assert self.rows.available + len(self.running) == self.rows.max_rows, "a page-table row was lost"
        if not self.running:
            assert self.cache.protected == self.cache.detached == 0, "pages are locked, but no request runs"
        if not deep:
            return
        holders = [req.node for req in self.running if req.node is not None]
        assert len(holders) == len(self.running)
        self.cache.check_invariants(holders, self.waiting.check_invariants())
        owned = self.pages.free_pages() + [node.page for node in self.cache.nodes()]
        owned += [node.page for node in self.cache.outdated()]
        for req in self.running:
            assert req.node is not None and req.cached_len <= len(req.pages) * self.page_size
            assert req.node.depth * self.page_size <= req.sound_len <= min(req.cached_len, len(req.token_ids))
            assert req.pages[: req.num_shared] == self.cache.path_pages(req.node), "a shared page is not cached"
            owned += req.pages[req.num_shared :]
        assert len(set(owned)) == len(owned), "a KV page has two owners"
        assert len({req.row for req in self.running}) == len(self.running), "two requests share a page-table row"
        assert self.admission.step_bytes == sum(r.step_bytes for r in self.running), "memory of steps was lost"
        for req in self.waiting:
            assert req.row < 0 and not req.pages and req.node is None, "a waiting request holds KV"
        assert self._num_retracted == sum(req.started for req in self.waiting)


def _arrival(req: Req) -> int:
    return req.arrival
