"""Stands in for the `sglang` names that the adapters of verl and slime import, so that they start this server.

    import verl_server.compat.sglang

    verl_server.compat.sglang.install()
    from verl.workers.rollout.sglang_rollout.http_server_engine import HttpServerAdapter

`install` makes `import sglang...` find the modules of `names.MODULES`. Every other name of SGLang raises an ImportError
with the remedy. `server_args` translates settings, `launch` starts the server, `weight_sync` writes SGLang's payloads.

The adapters send no key after their first call. So the server starts without a key, which is permitted on a loopback
address only, and warns. On another address, set `allow_unauthenticated=True` if you trust the network.
"""

from verl_server.compat.sglang.finder import install

__all__ = ["install"]
