"""What a model's memory is spent on, told from its config alone: pure arithmetic, no weights and no torch."""
