"""The tokenizer has the class that AutoTokenizer would choose, even when AutoTokenizer is not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from verl_server.errors import ServerLaunchError
from verl_server.models.tiny import Arch, make_model_folder
from verl_server.server.text import tokenizer
from verl_server.server.text.tokenizer import FastTokens, ModelText
from verl_server.server_args import ServerArgs

TEXT = "Grüße,  it's 12345 o'clock\n\n<|im_start|>now"


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "named",
    ["PreTrainedTokenizerFast", "TokenizersBackend", "Qwen2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizerFast"],
)
def test_the_tokenizer_is_autotokenizers(tmp_path: Path, arch: Arch, named: str) -> None:
    folder = make_model_folder(tmp_path, arch, weights=False)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": named}))
    text = ModelText(ServerArgs(model_path=str(folder)))
    text.load_tokenizer()
    theirs = AutoTokenizer.from_pretrained(folder)
    assert type(text.tokenizer) is type(theirs)
    ids = text.encode(TEXT)
    assert ids == theirs.encode(TEXT)
    assert text.decoder()(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert text.tokenizer.eos_token_id == theirs.eos_token_id
    assert text.tokenizer.chat_template == theirs.chat_template


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_a_pipeline_that_transformers_replaces(tmp_path: Path, arch: Arch, caplog: pytest.LogCaptureFixture) -> None:
    """Its tokens are used, with a warning that names the file, or those of tokenizer.json if a setting says so."""
    folder = make_model_folder(tmp_path, arch, weights=False)
    file = folder / "tokenizer.json"
    ours = Tokenizer.from_file(str(file))
    ours.normalizer = normalizers.Lowercase()
    ours.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    ours.save(str(file))
    encoded = {}
    for pipeline in ("transformers", "file"):
        text = ModelText(ServerArgs(model_path=str(folder), tokenizer_pipeline=pipeline))  # type: ignore[arg-type]
        caplog.clear()
        text.load_tokenizer()
        warned = f"replaced normalizer and pre_tokenizer of {file}" in caplog.text
        assert warned == (arch == "qwen2" and pipeline == "transformers")
        assert text.tokenizer_json is not None
        in_worker = FastTokens.from_json(text.tokenizer_json)
        assert in_worker.encode(TEXT) == text.encode(TEXT)
        encoded[pipeline] = text.encode(TEXT)
    assert encoded["transformers"] == AutoTokenizer.from_pretrained(folder).encode(TEXT)
    assert encoded["file"] == ours.encode(TEXT).ids
    assert (encoded["file"] == encoded["transformers"]) == (arch != "qwen2")


def test_code_of_a_tokenizer_is_left_to_autotokenizer(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "qwen3", weights=False)
    assert tokenizer._tokenizer_class(folder, trust_remote_code=False) is not AutoTokenizer
    assert tokenizer._tokenizer_class(folder, trust_remote_code=True) is AutoTokenizer
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": [None, "x.Y"]}}))
    assert tokenizer._tokenizer_class(folder, trust_remote_code=False) is AutoTokenizer


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", [10**30, -5, 1.5, True, "2", [2, -1], [[2]]])
def test_an_eos_token_id_that_is_no_id_is_refused_by_file(tmp_path: Path, file: str, value: Any) -> None:
    folder = make_model_folder(tmp_path, "llama", weights=False)
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | {"eos_token_id": value}))
    with pytest.raises(ServerLaunchError, match=rf"{file}: eos_token_id must be a token id"):
        ModelText(ServerArgs(model_path=str(folder)))


@pytest.mark.parametrize(("value", "ids"), [(7, [7, 2]), ([7, 8], [7, 8, 2]), (None, [2])])
def test_the_generation_configs_ids_end_a_completion(tmp_path: Path, value: Any, ids: list[int]) -> None:
    folder = make_model_folder(tmp_path, "llama", weights=False)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    text = ModelText(ServerArgs(model_path=str(folder)))
    text.load_tokenizer()
    assert text.eos_token_ids == ids


@pytest.mark.parametrize("template", [7, {"default": "x"}, [{"name": 1}], [{"name": "default"}], ["x"]])
def test_a_chat_template_of_another_type_is_refused_by_file_and_key(tmp_path: Path, template: Any) -> None:
    folder = make_model_folder(tmp_path, "llama", weights=False)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    with pytest.raises(ServerLaunchError, match=rf"^{path}: .*at `\$\.chat_template"):
        ModelText(ServerArgs(model_path=str(folder))).load_tokenizer()


def test_several_chat_templates_are_loaded(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "llama", weights=False)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    text = ModelText(ServerArgs(model_path=str(folder)))
    text.load_tokenizer()
    assert text.tokenizer.chat_template == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize("source", ["{" * 200_000, "{{" + "(" * 50_000])
def test_a_template_file_that_cannot_be_compiled_is_named(tmp_path: Path, source: str) -> None:
    folder = make_model_folder(tmp_path, "llama", weights=False)
    (folder / "deep.jinja").write_text(source)
    path = str(folder / "deep.jinja")
    for setting, value in (("chat_template", path), ("allowed_chat_templates", [path])):
        args = ServerArgs(model_path=str(folder)).replace(**{setting: value})
        with pytest.raises(ServerLaunchError, match=rf"{setting}: '{path}': The chat template cannot be compiled"):
            ModelText(args)
