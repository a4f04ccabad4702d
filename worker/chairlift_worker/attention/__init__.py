"""Attention on pages: backends, their cache, and the way into transformers' forward."""
