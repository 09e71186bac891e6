"""`python -m verl_server`: the command line."""

from __future__ import annotations

import sys

from verl_server.cli.main import main

sys.exit(main())
