"""The parts of `benchmarks.hostile_callers`.

`requests` and `raw` are the attacks, `attackers` runs them in client processes, `others` measures what they do to other
callers, `few_files` starts a server with a low limit of open files, and `connection_memory` measures connections.
"""
