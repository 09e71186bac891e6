"""`verl-server watch RUN [RUN ...]`: a page on this machine that shows training runs and rollouts while they run.

It only reads. `verl_server.watch.site` is the server and the page.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.files.command_options import parse_options
from verl_server.watch.site.doors import check_address
from verl_server.watch.site.export import MEGABYTES, write_export
from verl_server.watch.site.runs import OpenRuns
from verl_server.watch.site.server import serve
from verl_server.web.addresses import is_loopback
from verl_server.web.key_files import check_key, read_key_file

_KEY_VARIABLE = "VERL_SERVER_API_KEY"


@dataclass(frozen=True)
class WatchArgs:
    """Show runs on a web page, while they run or afterwards: curves, who waits for whom, groups, episodes, tokens.

    A RUN is the folder of a training run, of `rollout --agent` or of the demo, a file that `rollout --out` wrote, or a
    folder with runs inside, such as `runs`. Nothing in them is changed.

    Exit status: 130 after Ctrl-C, 143 after SIGTERM, 0 after an export, 1 if a RUN cannot be opened or the address
    cannot be used, 2 for wrong options.
    """

    runs: Positional[tuple[Path, ...]] = ()
    """Folders of runs, files of trajectories, or folders with runs inside."""
    store: tuple[Path, ...] = ()
    """Folders of session stores (`serve --session-store`), whose sessions are shown like a run."""
    host: str = "127.0.0.1"
    """Address to listen on. An address that is not loopback needs a key."""
    port: int = 8090
    """TCP port; the next free one if it is in use. 0 selects any free one."""
    api_key_file: Path | None = None
    """File with the key that the page asks for. VERL_SERVER_API_KEY is the key of an address that is not loopback
    without a file."""
    tokenizer: str | None = None
    """Folder, tokenizer.json or hub id of the tokenizer that decodes tokens, on this machine only. Default: the one
    that the run's settings name."""
    export: Path | None = None
    """Write the page with what it shows to one HTML file, and end. It opens without a server."""
    export_megabytes: float = MEGABYTES
    """Most megabytes of figures and texts in the file. The newest step and the worst episodes come first."""

    def __post_init__(self) -> None:
        if not (self.runs or self.store):
            raise BadRequestError("Name the folder of a run, such as runs/x, or a folder with runs; or --store.")
        if not 0 <= self.port <= 65535:
            raise BadRequestError(f"WatchArgs.port={self.port} must be from 0 to 65535.")
        if not self.export_megabytes > 0:
            raise BadRequestError(f"WatchArgs.export_megabytes={self.export_megabytes:g} must be above 0.")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_options(WatchArgs, argv, "verl-server watch")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    runs = OpenRuns(args.runs, args.tokenizer, stores=args.store, follow=args.export is None)
    if args.export is not None:
        return _export(args, runs, args.export)
    key = key_of(args)
    check_address(args.host, key)
    runs.start()
    try:
        serve(runs, args.host, args.port, key, lambda url: _say(runs, url, has_key=key is not None))
    finally:
        runs.close()
    return 0


def _export(args: WatchArgs, runs: OpenRuns, file: Path) -> int:
    try:
        runs.poll()
        left_out = write_export(file, runs, megabytes=args.export_megabytes)
    except OSError as error:
        raise VerlServerError(f"{file} cannot be written: {error.strerror or error}.") from None
    finally:
        runs.close()
    rest = f", without {left_out} answers that do not fit (--export-megabytes)" if left_out else ""
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB{rest}")
    return 0


def key_of(args: WatchArgs) -> str | None:
    """Return the key of /api. A page on loopback has one only if a file was named."""
    variable = os.environ.pop(_KEY_VARIABLE, "") or None
    if args.api_key_file is not None:
        return read_key_file(args.api_key_file, "--api-key-file")
    if is_loopback(args.host):
        return None
    if variable is not None:
        check_key(variable, _KEY_VARIABLE)
    return variable


def _say(runs: OpenRuns, url: str, *, has_key: bool) -> None:
    names = ", ".join(run.path.name or str(run.path) for run in list(runs.runs.values())[:5])
    more = len(runs.runs) - 5
    print(f"Watching {names}{f' and {more} more' if more > 0 else ''}. Ctrl-C ends.", file=sys.stderr)
    if has_key:
        print("The page asks for the key.", file=sys.stderr)
    print(url, flush=True)
