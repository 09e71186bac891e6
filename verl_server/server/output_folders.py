"""`check_output_folders`: the folders that a server writes are tried before a model is loaded."""

from __future__ import annotations

from pathlib import Path

from verl_server.errors import BadRequestError
from verl_server.files.run_output import check_folder
from verl_server.server_args import ServerArgs


def check_output_folders(server_args: ServerArgs) -> None:
    """Create the folders that a server writes, and write to them on trial, before a model is loaded.

    Raises BadRequestError, which names the setting, the folder and the reason.
    """
    for name in ("session_store", "profile_folder"):
        folder = getattr(server_args, name)
        if folder is not None:
            if not folder.strip():
                raise BadRequestError(f"ServerArgs.{name} is empty: name a folder, or leave the setting out.")
            try:
                check_folder(Path(folder))
            except BadRequestError as error:
                raise BadRequestError(f"ServerArgs.{name}: {error}") from None
