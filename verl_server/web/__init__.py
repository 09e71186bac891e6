"""What guards a door: every HTTP server of this project checks paths, origins, keys and sizes with these modules.

The rollout server (`server`) and the environment server (`rollout`) use them; they import neither of both.
"""
