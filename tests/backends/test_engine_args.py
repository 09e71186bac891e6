"""`engine_args` may not have what the driver sets, nor what would break a promise. Needs no vLLM."""

from pathlib import Path

import pytest

from verl_server.backends.process.engine_args import check_engine_args
from verl_server.backends.vllm.settings import REFUSED, engine_settings
from verl_server.errors import BadRequestError
from verl_server.server_args import ServerArgs


@pytest.mark.parametrize("name", ["model", "worker_extension_cls", "worker_cls", "scheduler_cls", "enable_eplb"])
def test_name_is_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match=f"must not have {name}"):
        check_engine_args({name: True}, {"model", "worker_extension_cls"}, REFUSED)


def test_other_names_pass() -> None:
    check_engine_args({"enforce_eager": True}, {"model"}, REFUSED)


def test_auto_is_the_dtype_of_the_checkpoint(tiny_qwen3: Path) -> None:
    args = ServerArgs(model_path=str(tiny_qwen3), engine="vllm")
    assert args.dtype == "auto"
    assert engine_settings(args)["dtype"] == "float32"
    assert (
        engine_settings(ServerArgs(model_path=str(tiny_qwen3), engine="vllm", dtype="bfloat16"))["dtype"] == "bfloat16"
    )
