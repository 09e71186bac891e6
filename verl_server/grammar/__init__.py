"""Constrained decoding: from the grammar of a request to matchers, with the llguidance library.

Text workers check grammars, and rank 0's scheduler compiles the checked ones. This package knows no process.
"""
