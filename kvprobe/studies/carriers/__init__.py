"""Carriers: after a turn was masked, which of the slots that stay carry its effect."""
