"""Settings that cannot work are refused where they are made, by name."""

from __future__ import annotations

import math
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
        ("host", "0.0.0.0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BadRequestError, match=value if name == "host" else name):
        ServerArgs(model_path="model", **{name: value})
