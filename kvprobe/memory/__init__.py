"""What a model needs memory for, from its config alone: arithmetic, and torch only where a policy is named."""
