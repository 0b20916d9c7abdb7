"""Idle rebuild: where a session drifts whose compacted cache expired and was computed again from the visible text."""
