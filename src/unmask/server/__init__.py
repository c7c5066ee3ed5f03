"""The server: an engine whose batch requests join and leave at any step, and the HTTP routes in front of it."""
