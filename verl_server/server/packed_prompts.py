"""Binary prompts: the token ids of a `/generate` request as int32 in front of its JSON.

It takes milliseconds to write and to read a long list of ids as JSON. With the header `X-Verl-Prompt-Bytes`, the body
of `POST /generate` begins with the ids. `HttpServerEngineAdapter` sends 1,024 ids and more in this form. The answer is
that of the same request in JSON.

    X-Verl-Prompt-Bytes: N    header: N in decimal digits, a positive multiple of 4, at most the size of the body
    bytes 0 to N - 1          token ids of all prompts, one prompt after the other: little-endian int32, no padding
    bytes N to the end        JSON object in UTF-8 with all other fields, without `text` and `input_ids`; may be empty

Without the field `prompt_lengths`, the N / 4 ids are one prompt, and the answer is one result. With
`"prompt_lengths": [3, 2]` they are a batch: its first prompt has the first 3 ids, its second prompt the next 2. Each
length is at least 1, and their sum is N / 4. The answer is a list, also for a list of one length. Fields that take a
list have one entry for each prompt, as with `input_ids` in JSON.

The JSON may have 131,072 bytes, and its regular expressions (`stop_regex`) together 48 characters. Send a request with
more as JSON. The other limits are those of JSON: `max_request_bytes` for the whole body, `max_samples_per_request`,
`max_prompt_tokens_per_request`, and the context length for each prompt. Only `/generate` reads the header. In a session
a request has one prompt.

A malformed request is answered 400 with a message that names the header or the field: a header that is no such number,
JSON that is not an object, `text` or `input_ids` beside the header, `prompt_lengths` without the header, a length below
1, a wrong sum, an id outside the vocabulary. Then nothing is generated, not even for the other prompts of a batch.

    import struct

    import httpx
    import numpy as np

    url = "http://127.0.0.1:30000/generate"


    def generate(ids: bytes, fields: bytes) -> httpx.Response:
        headers = {"X-Verl-Prompt-Bytes": str(len(ids)), "Content-Type": "application/json"}
        return httpx.post(url, content=ids + fields, headers=headers, timeout=60)


    one = struct.pack("<3i", 11, 12, 13)
    print(generate(one, b'{"sampling_params": {"max_new_tokens": 4}}').json()["output_ids"])

    prompts = [np.array([11, 12, 13], "<i4"), np.array([21, 22], "<i4")]
    batch = b"".join(prompt.tobytes() for prompt in prompts)
    fields = b'{"prompt_lengths": [3, 2], "sampling_params": {"max_new_tokens": 4}}'
    print([result["output_ids"] for result in generate(batch, fields).json()])
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from verl_server.errors import BadRequestError
from verl_server.messages.io_struct import PROMPT_HEADER
from verl_server.messages.packed import ITEM
from verl_server.server.generate_request import GenerateReqInput, ReadRequest
from verl_server.server.slices import Slices
from verl_server.server.text.stop_regex import StopRegexes
from verl_server.server.text.text_tools import Ids, TextTools
from verl_server.web.json_body import MalformedBodyError, names_of_unknown, parse_json
from verl_server.web.numbers import whole_number


def split_prompt(header: str, body: bytes) -> tuple[memoryview, bytes]:
    """Return (token ids as int32, JSON) of a body that begins with the ids.

    `header` is the value of `PROMPT_HEADER`.
    """
    size = whole_number(header, most_digits=15) or 0
    if not 0 < size <= len(body) or size % ITEM:
        raise BadRequestError(
            f"{PROMPT_HEADER} is {header[:40]!r}, but must be the number of bytes of int32 token ids at the beginning "
            f"of the body: a positive multiple of {ITEM}, at most {len(body)}, which is the size of the body."
        )
    view = memoryview(body)  # a copy of the ids of a whole batch would take long
    return view[:size], bytes(view[size:])


async def read_packed(tools: TextTools, ids: memoryview, body: bytes) -> ReadRequest:
    """Parse the JSON `body` and check the prompts `ids`. Return what `read_generate` returns for the same request.

    `ids` holds the little-endian int32 ids of all prompts, one prompt after the other. The event loop can do other work
    between two prompts. Raise BadRequestError or NeedsWorkerError.
    """
    try:
        raw = parse_json(body)
    except MalformedBodyError as error:
        raise MalformedBodyError(f"After the {len(ids)} bytes of {PROMPT_HEADER}: {error}") from None
    request = GenerateReqInput.parse(raw)
    if request.text is not None or request.input_ids is not None:
        raise BadRequestError(f"With {PROMPT_HEADER}, the prompt comes before the JSON: leave out text and input_ids.")
    patterns = request.stop_regex()
    tools.check_regex_place(patterns)
    lengths, total = request.prompt_lengths, len(ids) // ITEM
    if lengths is not None:
        tools.limits.check_samples(len(lengths), 1)
        _check_lengths(lengths, total)
    slices, prompts, start = Slices(), list[Ids](), 0
    given = [total] if lengths is None else lengths
    for length, keep in zip(given, request.kept_tokens(len(given), tools.bounds), strict=True):
        end = start + length
        first = start if keep is None else max(start, end - keep)
        tools.bounds.check_length(end - first)  # before the copy
        prompts.append(tools.prompt(bytes(ids[ITEM * first : ITEM * end])))
        start = end
        await slices.end()
    for pattern in patterns:
        StopRegexes([pattern])
    return ReadRequest(
        request=msgspec.structs.replace(request, prompt_lengths=None),
        prompts=prompts,
        is_single=lengths is None,
        unknown_fields=names_of_unknown(raw, request),
    )


def _check_lengths(lengths: Sequence[int], total: int) -> None:
    """Raise BadRequestError if `total` token ids cannot be prompts of these lengths."""
    if not lengths:
        raise BadRequestError("prompt_lengths cannot be empty: leave the field out for one prompt.")
    for i, length in enumerate(lengths):
        if not 1 <= length <= total:
            raise BadRequestError(
                f"prompt_lengths[{i}] must be in 1..{total}: {PROMPT_HEADER} announces {total} token ids, and a prompt "
                "cannot be empty."
            )
    if sum(lengths) != total:
        raise BadRequestError(
            f"The sum of prompt_lengths is {sum(lengths)}, but {PROMPT_HEADER} announces {total} token ids "
            f"({ITEM * total} bytes). Send the number of token ids of each prompt."
        )
