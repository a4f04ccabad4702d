"""Speculative decoding: guesses of what a request's next tokens are, checked in the step that would bring the first.

lookup: the guesses, from what the request has said before. policy: whether they pay, by what was measured. drafter:
both for one request. speculator: for all requests of a step. choice: the settings.
"""
