"""Use: whether the model uses what a probe reads, by erasing it from the cache and by exchanging it for another
run's."""
