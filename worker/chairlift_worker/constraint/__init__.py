"""Outputs of a given form: which tokens may come next, by a grammar."""
