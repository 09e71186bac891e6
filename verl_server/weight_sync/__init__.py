"""Weight updates: new weights are copied from a trainer, or from a file, into the server's parameters, in place.

`handles` is the wire format, and `checksum` computes the checksums that trainer and server compare. `trainer` describes
and pushes a trainer's memory. `receiver` opens this memory (or checkpoints, or SGLang's pickles) and plans the copies.
`copying` runs a plan. `group` serves trainers on other hosts. `docs/weight-sync.md` describes weight updates for users.
"""
