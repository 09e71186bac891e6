"""Stand-ins for the Python names of other servers, for programs that import them. Each is opt-in."""
