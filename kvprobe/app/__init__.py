"""The microscope on a page: a conversation, what is done to its cache, and what the model then says."""
