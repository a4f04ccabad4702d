"""Paged key-value memory: which page belongs to whom. Ids and counts only; the bytes belong to the runner."""
