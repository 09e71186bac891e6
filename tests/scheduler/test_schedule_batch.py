"""A step's message says what the planned lengths say, and a step that was not launched can be undone."""

from __future__ import annotations

from tests.scheduler.planned import request
from verl_server.scheduler.schedule_batch import BatchOutput, Req, ScheduleBatch


def running(rid: str, ids: list[int], row: int, *, cached: int = 0, device: int | None = None, **fields: object) -> Req:
    req = request(rid, ids, **fields)
    req.row, req.cached_len, req.device_len = row, cached, len(ids) if device is None else device
    req.prefilling = req.device_len - cached > 1
    req.pages, req.page_updates = [row * 10, row * 10 + 1], [(0, [row * 10, row * 10 + 1])]
    return req


def lengths(req: Req) -> tuple[int, int]:
    return req.cached_len, req.num_pending


def test_a_chunk_samples_nothing_and_the_end_of_a_prompt_samples_a_token() -> None:
    chunk, end = running("chunk", [1, 2, 3, 4, 5], 0, device=3), running("end", [6, 7], 1)
    batch = ScheduleBatch.build([chunk, end])
    assert batch.forward.input_ids == [1, 2, 3, 6, 7] and batch.forward.extend_lens == [3, 2]
    assert (batch.sampled, batch.forward.sample, batch.prefills) == ([end], [1], [chunk, end])
    assert batch.forward.page_updates == [(0, 0, [0, 1]), (1, 0, [10, 11])] and not end.page_updates
    assert (lengths(chunk), lengths(end)) == ((3, 0), (2, 1))


def test_a_token_that_only_the_device_knows_is_minus_one() -> None:
    req = running("a", [1, 2], 0)
    ScheduleBatch.build([req])
    req.device_len, req.prefilling = 3, False
    batch = ScheduleBatch.build([req])
    assert batch.forward.input_ids == [-1] and lengths(req) == (3, 2)


def test_a_prompt_without_a_reply_samples_nothing() -> None:
    batch = ScheduleBatch.build([running("a", [1, 2], 0, max_new_tokens=0)])
    assert batch.sampled == [] and batch.forward.input_ids == [1, 2]


def test_undo_restores_the_lengths_and_the_page_updates_of_what_still_runs() -> None:
    kept, ended = running("kept", [1, 2, 3], 0), running("ended", [4, 5], 1)
    batch = ScheduleBatch.build([kept, ended])
    kept.page_updates = [(2, [2])]  # written after the step was planned
    ended.row = -1
    batch.undo()
    assert lengths(kept) == (0, 0) and kept.page_updates == [(0, [0, 1]), (2, [2])]
    assert lengths(ended) == (2, 1), "its lengths do not matter any more"


def test_a_request_that_is_left_out_computes_its_newest_token_again() -> None:
    req = running("a", [1, 2, 3], 0)
    batch = ScheduleBatch.build([req])
    batch.leave_out([req])
    assert lengths(req) == (2, 0)
    batch.undo()
    assert lengths(req) == (0, 0)


def test_positions_of_prompt_log_probabilities_in_a_chunk() -> None:
    def positions(cached: int, device: int) -> tuple[list[int], list[int]]:
        req = running("a", [1, 2, 3, 4, 5], 0, cached=cached, device=device, return_logprob=True, logprob_start_len=2)
        req.prefilling = True
        forward = ScheduleBatch.build([req]).forward
        return [first for _, first, _, _ in forward.prompt_logprobs], forward.prompt_next_ids

    assert positions(0, 2) == ([], []), "the chunk ends before the start"
    assert positions(0, 4) == ([2], [5]), "the token after the chunk is predicted by its last one"
    assert positions(1, 5) == ([1], [-1]), "the token after the prompt is not part of it"
    assert positions(4, 5) == ([], []), "the last token of the prompt predicts no token of it"


def test_a_request_ends_at_a_stop_token_before_its_length() -> None:
    req = request("a", [1], 2, stop_ids=[5])
    req.num_pending = 2
    assert req.append(4) is None
    reason = req.append(5)
    assert reason is not None and (reason.type, reason.matched, req.output_ids) == ("stop", 5, [4, 5])
    full = request("b", [1], 1)
    assert (end := full.append(4)) is not None and (end.type, end.length) == ("length", 1)


def test_what_may_come_from_the_cache_ends_before_the_first_token_to_compute() -> None:
    assert request("a", [1, 2, 3]).reuse_limit() == 2
    assert request("b", [1, 2, 3], return_logprob=True, logprob_start_len=1).reuse_limit() == 1


def test_an_output_message_has_one_entry_for_each_request_and_is_sent_once() -> None:
    out = BatchOutput()
    assert out.take("1") is None
    silent, loud = request("silent", [1]), request("loud", [1], return_logprob=True)
    assert [out.add(req, None, [3], [-0.5]) for req in (silent, loud)] == [0, 1]
    message = out.take("2")
    assert message is not None and message.rids == ["silent", "loud"] and message.weight_version == "2"
    assert list(message.output_logprobs) == [[], [-0.5]] and out.take("2") is None
