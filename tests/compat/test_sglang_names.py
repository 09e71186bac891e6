"""`verl_server.compat.sglang` stands in for SGLang's names. Tests that install it do so in processes of their own."""

from __future__ import annotations

import ast
import base64
import pickletools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import fork_server
from verl_server.compat.sglang.names import MODULES
from verl_server.compat.sglang.server_args import REFUSED, WITHOUT_EFFECT, ServerArgs
from verl_server.compat.sglang.weight_sync import FlattenedTensorBucket
from verl_server.errors import BadRequestError
from verl_server.server_args import ServerArgs as Settings

INSTALL = "import verl_server.compat.sglang as compat; compat.install()\n"


def run(code: str) -> str:
    """Run Python code in a process of its own, and return the last line that it printed."""
    process = fork_server.run_module(
        "tests.compat.run_code", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output, _ = process.communicate(code, timeout=60)
    return str(output).strip().rpartition("\n")[2]


def test_every_name_can_be_imported_and_others_name_the_remedy() -> None:
    imports = [f"from {module} import {name}" for module, names in MODULES.items() for name in names]
    wrong = ["from sglang import Engine", "import sglang.srt.layers", "from sglang.srt.utils import get_device"]
    code = INSTALL + "\n".join(imports) + "\nimport importlib.util\nassert importlib.util.find_spec('sglang')\n"
    code += f"""
for line in {wrong}:
    try:
        exec(line)
    except ImportError as error:
        assert 'attach the program to a running verl-server' in str(error), error
    else:
        raise AssertionError(line)
assert not hasattr(__import__('sglang'), '__wrapped__')
compat.install()
print('done')
"""
    assert run(code) == "done"


def test_it_refuses_beside_the_real_package(tmp_path: Path) -> None:
    (tmp_path / "sglang.py").write_text("")
    message = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sglang\n{INSTALL}")
    assert message.startswith("ImportError:") and "before sglang is imported" in message


def test_settings_have_one_place_each() -> None:
    own = set(Settings.__dataclass_fields__)
    assert not own & set(WITHOUT_EFFECT) and not own & set(REFUSED) and not set(WITHOUT_EFFECT) & set(REFUSED)
    assert own | set(WITHOUT_EFFECT) | set(REFUSED) == set(ServerArgs.__dataclass_fields__)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_settings_name_themselves(name: str) -> None:
    default, remedy = REFUSED[name]
    ServerArgs(model_path="m", **{name: default}).translated()
    ServerArgs(model_path="m", **{name: None}).translated()
    value: Any = 7 if isinstance(default, int) and not isinstance(default, bool) else "other"
    with pytest.raises(BadRequestError, match=rf"ServerArgs\.{name}=") as refusal:
        ServerArgs(model_path="m", **{name: value}).resolve_once()
    assert remedy in str(refusal.value)


def test_settings_are_translated() -> None:
    sent = {
        "tp_size": 2,
        "dtype": "half",
        "attention_backend": "fa3",
        "grammar_backend": "xgrammar",
        "log_level": "WARN",
        "max_running_requests": None,
        "chunked_prefill_size": -1,
        "mem_fraction_static": 0.5,
        "enable_memory_saver": True,
        "host": "::1",
    }
    settings = ServerArgs(model_path="m", **sent).translated()
    expected = {
        "grammar_backend": "llguidance",
        "tp_size": 2,
        "dtype": "float16",
        "attention_backend": "auto",
        "log_level": "warning",
    }
    expected |= {"max_running_requests": 256, "chunked_prefill_size": None, "mem_fraction_static": 0.5}
    assert {name: getattr(settings, name) for name in expected} == expected
    assert ServerArgs(model_path="m", host="::1", port=5).url() == "http://[::1]:5"


def test_an_open_address_needs_a_decision() -> None:
    with pytest.raises(BadRequestError, match="allow_unauthenticated"):
        ServerArgs(model_path="m", host="0.0.0.0").translated()
    assert ServerArgs(model_path="m", host="0.0.0.0", allow_unauthenticated=True).translated().api_key is None


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(TypeError, match="no_such_setting"):
        ServerArgs(model_path="m", no_such_setting=1)


def test_flags_build_the_settings() -> None:
    code = (
        INSTALL
        + """
import argparse, pickle
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
given = parser.parse_args(['--model-path', 'm', '--port', '7', '--no-enable-metrics', '--max-total-tokens', '64'])
args = ServerArgs.from_cli_args(given)
assert pickle.loads(pickle.dumps(args)) == args
settings = args.translated()
print([settings.port, settings.enable_metrics, settings.max_total_tokens, settings.gpu_uuids])
"""
    )
    assert ast.literal_eval(run(code)) == [7, False, 64, ()]


def test_payloads_carry_the_names_that_the_server_reads() -> None:
    code = (
        INSTALL
        + """
import base64, torch
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
bucket = FlattenedTensorBucket([('a', torch.ones(2, 3)), ('b', torch.zeros(1, dtype=torch.bfloat16))])
sent = {'flattened_tensor': bucket.get_flattened_tensor(), 'metadata': bucket.get_metadata()}
print(MultiprocessingSerializer.serialize(sent, output_str=True))
"""
    )
    payload = base64.b64decode(run(code))
    strings = {argument for _, argument, _ in pickletools.genops(payload) if isinstance(argument, str)}
    assert {"sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata", "rebuild_storage_filename"} <= strings


def test_buckets_count_bytes() -> None:
    bucket = FlattenedTensorBucket([("a", torch.ones(2, 3)), ("b", torch.zeros(1, dtype=torch.bfloat16))])
    assert bucket.get_flattened_tensor().dtype == torch.uint8 and bucket.get_flattened_tensor().numel() == 26
    assert [(m.name, m.start_idx, m.end_idx) for m in bucket.get_metadata()] == [("a", 0, 24), ("b", 24, 26)]
    with pytest.raises(ValueError, match="at least one"):
        FlattenedTensorBucket([])


def test_a_payload_that_is_unpickled_here_names_the_route() -> None:
    with pytest.raises(RuntimeError, match="Send it to the server's route /update_weights_from_tensor"):
        MODULES["sglang.srt.utils.patch_torch"]["_rebuild_cuda_tensor_modified"]()
