"""`python -m benchmarks.gates`: the figures that a change must keep, as shares of limits of the same run.

`parts` lists the benchmarks of each set, `figures` what is read from their output, `running` runs them one by one,
`shares` has what earlier runs reached on each card (`shares.json`), and `table` prints the outcome.
"""
