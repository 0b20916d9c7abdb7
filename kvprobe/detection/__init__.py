"""Whether a cache is what it should be: differences, audits without a reference, canaries, and a zoo of real bugs."""
