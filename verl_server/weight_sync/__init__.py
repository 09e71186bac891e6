"""Trainer -> server: new weights, from whoever owns them into parameters that never move.

`handles` is what travels, `checksum` what both ends compare. `trainer` describes and pushes a trainer's memory,
`server` reads it (and checkpoints, and SGLang's pickles) into a plan of copies, `copying` carries a plan out, `group`
is for trainers of other hosts. `docs/weight-sync.md` describes it for users.
"""
