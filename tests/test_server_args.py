"""Settings that cannot work are refused, by name, when `ServerArgs` is created."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from verl_server import BadRequestError, ServerArgs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("weight_update_lease", value) for value in (0.0, -1.0, math.inf, math.nan)),
        ("control_timeout", math.nan),
        ("weight_receive_bytes", 0),
        ("weight_receive_bytes", -(2**20)),
        ("tp_size", 0),
        ("mem_fraction_static", 1.5),
        ("text_workers", 0),
        ("text_timeout", math.inf),
        ("schedule_policy", "lof"),
        ("schedule_max_age", 0.0),
        ("max_text_length", 0),
        ("max_samples_per_request", 0),
        ("max_top_logprobs", -1),
        ("max_logit_bias", -1),
        ("cpu_kernel_choice", "fastest"),
        ("host", "0.0.0.0"),
        *(("weight_version", value) for value in ("", "x" * 257)),
        *(("api_key", value) for value in ("", "a b", "schlüssel", "line\n")),
        ("admin_api_key_file", "/no/such/file"),
        *(("paused_request_timeout", value) for value in (0.0, -1.0, math.inf)),
    ],
)
def test_a_setting_that_cannot_work_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BadRequestError, match=value if name == "host" else name):
        ServerArgs(model_path="model", **{name: value})


def test_a_key_comes_from_a_file_which_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret-1\n")
    args = ServerArgs(model_path="model", host="0.0.0.0", api_key_file=str(file), admin_api_key="secret-2")
    assert (args.api_key, args.admin_api_key) == ("secret-1", "secret-2")
    file.unlink()
    assert ServerArgs.from_json(args.to_json()) == args == args.replace(port=30000)
    assert "secret" not in repr(args) + str(args.public_dict())
    file.write_text("secret-3")
    with pytest.raises(BadRequestError, match="two different keys") as caught:
        args.replace(api_key_file=str(file))
    assert "secret" not in str(caught.value)
