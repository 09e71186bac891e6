"""The import path that documents showed before `verl_server.rollout.environments.env_server` held the module."""

from verl_server.rollout.environments.env_server import EnvServer

__all__ = ["EnvServer"]
