"""Conversations with named segments, and their tokens."""
