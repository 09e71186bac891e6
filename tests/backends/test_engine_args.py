"""`engine_args` may not have what the driver sets, nor what would break a promise. Needs no vLLM."""

import pytest

from verl_server.backends.vllm.driver import check_engine_args
from verl_server.errors import BadRequestError


@pytest.mark.parametrize("name", ["model", "worker_extension_cls", "worker_cls", "scheduler_cls", "enable_eplb"])
def test_name_is_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match=f"must not have {name}"):
        check_engine_args({name: True}, {"model", "worker_extension_cls"})


def test_other_names_pass() -> None:
    check_engine_args({"enforce_eager": True}, {"model"})
