"""Runs the Python code on its standard input, in a process that tests start by fork."""

import sys

if __name__ == "__main__":
    exec(compile(sys.stdin.read(), "<test>", "exec"), {"__name__": "__main__"})
