"""What sparse features see of a turn that was masked."""
