"""The import path that documents showed before `verl_server.rollout.environments.tools` held the module."""

from verl_server.rollout.environments.tools import tool

__all__ = ["tool"]
