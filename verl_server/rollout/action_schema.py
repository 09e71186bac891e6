"""`ActionSchema`: checks actions against the JSON schema that an environment declares.

One belongs to each environment server. The schema is checked when the server starts, an action before each `step`.
"""

from __future__ import annotations

from typing import Any

from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry

from verl_server.errors import BadRequestError

_LONGEST_MESSAGE = 500


class ActionSchema:
    def __init__(self, name: str, schema: Any) -> None:
        """`name` is the environment's, for messages. Raises BadRequestError if `schema` is no JSON schema."""
        if not isinstance(schema, dict):
            raise BadRequestError(f"{name}.action_schema must be a dict (a JSON schema), not {schema!r}.")
        self._name = name
        validator = validator_for(schema, default=Draft202012Validator)
        try:
            validator.check_schema(schema)
        except SchemaError as error:
            where = error.json_path.removeprefix("$")
            raise BadRequestError(
                f"{name}.action_schema{where} is no valid JSON schema: {error.message[:_LONGEST_MESSAGE]}"
            ) from None
        self._validator = validator(schema, registry=Registry())  # an empty registry: no schema is downloaded

    def violation(self, action: dict[str, Any]) -> str | None:
        """What is wrong with an action, with the field's path; None if it fits the schema."""
        error = best_match(self._validator.iter_errors(action))
        if error is None:
            return None
        field = "action" + error.json_path.removeprefix("$")
        return f"The action violates {self._name}.action_schema at `{field}`: {error.message[:_LONGEST_MESSAGE]}"
