"""Serves a model until SIGTERM: `python -m tests.compat.serve_tiny FOLDER SETTINGS`.

SETTINGS is JSON. Without a `model_path` in it, the model is a tiny random one, whose folder is made in FOLDER. When the
server is ready, it prints {"url", "model"} on a line of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from verl_server.models.tiny import byte_tokenizer, make_model_folder
from verl_server.server.launch import run_server
from verl_server.server_args import ServerArgs

CHAT_TEMPLATE = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each call return a JSON object within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template of Qwen's form: tools as JSON, calls as Hermes's `<tool_call>`."""


def model_folder(parent: Path) -> Path:
    """Return the folder of the model, which is made once for each run."""
    folder = parent / "model"
    if not folder.exists():
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = CHAT_TEMPLATE
        make_model_folder(folder, "qwen3", tokenizer=tokenizer, max_position_embeddings=4096)
    return folder


def main() -> None:
    settings = {"port": 0, "kv_cache_gib": 0.25, "log_level": "warning"} | json.loads(sys.argv[2])
    if "model_path" not in settings:
        settings["model_path"] = str(model_folder(Path(sys.argv[1])))
    args = ServerArgs(**settings)
    run_server(args, lambda ready: print(json.dumps({"url": ready.url, "model": ready.model_path}), flush=True))


if __name__ == "__main__":
    main()
