"""Training: small models whose answers are known, trained from a recipe, resumably."""
