"""Policies: what each cache policy costs in quality for the memory that it saves."""
