"""`ActionSchema`: check actions against the JSON schema that an environment declares.

Each environment server checks an action before each `step`, and each renderer of JSON actions checks it, too. The
schema itself is checked when the object is created, at the start of the server or of the rollout.
"""

from __future__ import annotations

from typing import Any

from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry

from verl_server.errors import BadRequestError

_LONGEST_MESSAGE = 500


class ActionSchema:
    """The JSON schema of one environment's actions."""

    def __init__(self, name: str, schema: Any) -> None:
        """`name` is the environment's name, for messages. Raise BadRequestError if `schema` is not a JSON schema."""
        if not isinstance(schema, dict):
            raise BadRequestError(f"{name}.action_schema must be a dict (a JSON schema), not {schema!r}.")
        self._name = name
        self.schema: dict[str, Any] = schema
        validator = validator_for(schema, default=Draft202012Validator)
        try:
            validator.check_schema(schema)
        except SchemaError as error:
            where = error.json_path.removeprefix("$")
            raise BadRequestError(
                f"{name}.action_schema{where} is not a valid JSON schema: {error.message[:_LONGEST_MESSAGE]}"
            ) from None
        self._validator = validator(schema, registry=Registry())  # an empty registry: no schema is downloaded

    def violation(self, action: dict[str, Any]) -> str | None:
        """Return a sentence that names the field of `action` that violates the schema, and why; None if none does."""
        error = best_match(self._validator.iter_errors(action))
        if error is None:
            return None
        field = "action" + error.json_path.removeprefix("$")
        return f"The action violates {self._name}.action_schema at `{field}`: {error.message[:_LONGEST_MESSAGE]}"
