"""`StepStreamer`: sends the new tokens of each step from SGLang's scheduler, in place of its own senders.

SGLang sends a request's outputs in intervals, so that a message has tokens of several steps. Here each message has the
tokens of one step, which were computed with one version of the weights.
"""

from __future__ import annotations

from typing import Any

import msgspec

from verl_server.backends.sglang.outputs import Output, Outputs

_ENCODER = msgspec.msgpack.Encoder()


class StepStreamer:
    def __init__(self, socket: Any) -> None:
        """`socket` is the zmq socket of rank 0 to the driver, None on other ranks."""
        self._socket = socket

    def send(self, message: msgspec.Struct) -> None:
        if self._socket is not None:
            self._socket.send(_ENCODER.encode(message))

    def send_output(self, output: Any, _: Any = None) -> None:
        """Send the end of a request that SGLang's scheduler gives up, and nothing else of what it tells a tokenizer."""
        if type(output).__name__ == "AbortReq":
            reason = output.finished_reason or {"type": "abort", "message": output.abort_message}
            self.send(Outputs([Output(output.rid, [], 0, reason)]))

    def stream_output(self, reqs: list[Any], return_logprob: bool, skip_req: Any = None) -> None:
        """Send what is new of `reqs`, SGLang's requests. A finished request is sent once."""
        reqs = [req for req in reqs if req is not skip_req]
        ended = [req for req in reqs if req.finished() and not req.finished_output]
        running = [req for req in reqs if not req.finished()]
        for req in ended:
            req.finished_output = True
            if req.finished_len is None:
                req.finished_len = len(req.output_ids)
        if entries := [_output(req) for req in (*running, *ended)]:
            self.send(Outputs(entries))


def _output(req: Any) -> Output:
    ids = req.output_ids_through_stop
    start, req.send_token_offset = req.send_token_offset, len(ids)
    reason = req.finished_reason
    new = Output(req.rid, ids[start:].tolist(), req.cached_tokens, None if reason is None else reason.to_json())
    if req.return_logprob:
        _add_logprobs(new, req, start, len(ids))
    return new


def _add_logprobs(new: Output, req: Any, start: int, end: int) -> None:
    own, has_top = req.logprob, req.logprob.top_logprobs_num > 0
    if own.input_token_logprobs_val and not req.input_logprob_sent:
        req.input_logprob_sent = True
        new.prompt_logprobs = own.input_token_logprobs_val
        if has_top:
            new.prompt_top_logprobs, new.prompt_top_ids = own.input_top_logprobs_val, own.input_top_logprobs_idx
    new.logprobs = own.output_token_logprobs_val[start:end]
    if has_top:
        new.top_logprobs, new.top_ids = own.output_top_logprobs_val[start:end], own.output_top_logprobs_idx[start:end]
