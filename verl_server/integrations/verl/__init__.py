"""verl's rollout over verl-server."""
