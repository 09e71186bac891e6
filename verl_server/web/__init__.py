"""The guards that every HTTP server of this project shares: they check paths, origins, keys and sizes.

The rollout server (`server`) and the environment server (`rollout`) use them; they import neither of both.
"""
