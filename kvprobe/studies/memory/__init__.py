"""Is the budget right, and what does the cache cost and save?"""
