"""Live requests and kept results: who asked for what, what has come of it so far, and who reads it."""
