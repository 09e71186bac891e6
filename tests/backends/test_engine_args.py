"""`engine_args` may not have what the driver sets, nor what would break a promise. Needs no engine."""

from pathlib import Path
from typing import Any

import pytest

from verl_server.backends.process.engine_args import check_engine_args
from verl_server.backends.sglang import settings as sglang
from verl_server.backends.vllm import settings as vllm
from verl_server.errors import BadRequestError
from verl_server.server_args import ServerArgs


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("vllm", name) for name in ["model", "worker_extension_cls", *vllm.REFUSED]),
        *(("sglang", name) for name in ["model_path", "sampling_backend", *sglang.REFUSED]),
    ],
)
def test_name_is_refused(tiny_qwen3: Path, engine: Any, name: str) -> None:
    args = ServerArgs(model_path=str(tiny_qwen3), device="cpu", engine=engine, engine_args={name: True})
    with pytest.raises(BadRequestError, match=f"must not have {name}"):
        {"vllm": vllm, "sglang": sglang}[engine].engine_settings(args)


def test_other_names_pass(tiny_qwen3: Path) -> None:
    check_engine_args({"enforce_eager": True}, {"model"}, vllm.REFUSED)
    args = ServerArgs(model_path=str(tiny_qwen3), device="cpu", engine="sglang", engine_args={"attention_backend": "a"})
    assert sglang.engine_settings(args)["attention_backend"] == "a"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_auto_is_the_dtype_of_the_checkpoint(tiny_qwen3: Path, engine: Any) -> None:
    def dtype(**given: Any) -> str:
        args = ServerArgs(model_path=str(tiny_qwen3), device="cpu", engine=engine, **given)
        return str({"vllm": vllm, "sglang": sglang}[engine].engine_settings(args)["dtype"])

    assert dtype() == "float32"
    assert dtype(dtype="bfloat16") == "bfloat16"


def test_sglang_refuses_float32_on_a_gpu(tiny_qwen3: Path) -> None:
    for dtype in ("auto", "float32"):
        given: dict[str, Any] = {"device": "cuda", "engine": "sglang", "dtype": dtype}
        args = ServerArgs(model_path=str(tiny_qwen3), **given)
        with pytest.raises(BadRequestError, match="bfloat16"):
            sglang.engine_settings(args)
