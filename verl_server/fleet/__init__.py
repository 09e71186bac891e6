"""Many servers behind one address: `verl-server router`.

`router` is the application. `relay` carries one request to a server and its answer back, over the connections of
`upstream`. `members` knows the servers and their states, `placement` chooses one of them, `sessions` finds the server
of a session, and `control` sends control requests to all.
"""
