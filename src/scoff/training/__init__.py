"""One training loop for every supervised experiment: see `engine.fit`."""
