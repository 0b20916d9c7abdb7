"""Filter or poison: which components pass damage on to the answer, and which keep it away."""
