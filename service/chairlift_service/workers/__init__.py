"""The process that computes: how it is started, reached, watched and, when it is lost, replaced."""
